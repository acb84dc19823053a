//! A source file with all of its changes written into it, each behind the switch.

use crate::sites::Site;
use std::ops::Range;

/// The start and the end of a change's text in the written file.
pub struct Written {
    pub id: u32,
    pub place: Range<usize>,
}

/// Returns `source` with `sites`, and where each of them is in it. Changes may contain each other:
/// the one outside begins first and ends last.
pub fn rewrite(source: &str, sites: &[Site]) -> (String, Vec<Written>) {
    let mut insertions: Vec<_> = sites
        .iter()
        .enumerate()
        .flat_map(|(order, site)| {
            let len = site.place.len();
            // At one place, ends come before beginnings.
            let begin = (site.place.start, 1, usize::MAX - len, order);
            let end = (site.place.end, 0, len, usize::MAX - order);
            [(begin, order, true), (end, order, false)]
        })
        .collect();
    insertions.sort_unstable();
    let mut text = String::with_capacity(source.len() * 2);
    let mut written: Vec<_> =
        sites.iter().map(|site| Written { id: site.id, place: 0..0 }).collect();
    let mut copied = 0;
    for ((position, ..), order, begins) in insertions {
        text.push_str(&source[copied..position]);
        copied = position;
        if begins {
            written[order].place.start = text.len();
            text.push_str(&sites[order].before);
        } else {
            text.push_str(&sites[order].after);
            written[order].place.end = text.len();
        }
    }
    text.push_str(&source[copied..]);
    (text, written)
}

/// Returns the switch: the module that each changed crate gets, for changes up to number `last`.
pub fn switch(last: u32) -> String {
    SWITCH.replace("WORDS_OF_ALL", &(last / 64 + 1).to_string())
}

/// Nothing in it allocates, is a cancellation point or changes errno: tests that let memory run out,
/// count allocations or cancel a thread see the code as it is.
const SWITCH: &str = r#"//! Which change is on: that of PINFOLD_MUTANT. With PINFOLD_MUTANT_RECORD, a file gets the
//! number of each change that a thread passes, and the thread's name, which is the test's.
extern crate std;
use core::cell::Cell;
use core::ffi::{CStr, c_char, c_int, c_long};
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::io::Write as _;

const UNKNOWN: u32 = u32::MAX;
const RECORD: u32 = u32::MAX - 1;
static ON: AtomicU32 = AtomicU32::new(UNKNOWN);
std::thread_local!(static PASSED: [Cell<u64>; WORDS_OF_ALL] = const { [const { Cell::new(0) }; WORDS_OF_ALL] });

unsafe extern "C" {
    fn getenv(name: *const c_char) -> *const c_char;
    fn syscall(number: c_long, ...) -> c_long;
    fn __errno_location() -> *mut c_int;
}
#[cfg(target_arch = "x86_64")]
const CALLS: [c_long; 3] = [257, 1, 3];
#[cfg(target_arch = "aarch64")]
const CALLS: [c_long; 3] = [56, 64, 57];

#[inline]
pub fn on(id: u32) -> bool {
    let on = ON.load(Relaxed);
    if on >= RECORD { slow(id, on) } else { on == id }
}

fn variable(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: no test changes the environment; what is found stays.
    let found = unsafe { getenv(name.as_ptr()) };
    // SAFETY: as above.
    (!found.is_null()).then(|| unsafe { CStr::from_ptr(found) })
}

#[cold]
fn slow(id: u32, on: u32) -> bool {
    if on == UNKNOWN {
        let number = variable(c"PINFOLD_MUTANT").and_then(|text| text.to_str().ok()?.parse().ok());
        let record = variable(c"PINFOLD_MUTANT_RECORD").is_some();
        ON.store(if record { RECORD } else { number.unwrap_or(0) }, Relaxed);
        return self::on(id);
    }
    let (word, bit) = (id as usize / 64, 1 << (id % 64));
    let new = PASSED.try_with(|passed| passed[word].replace(passed[word].get() | bit) & bit == 0);
    if new == Ok(true) && let Some(path) = variable(c"PINFOLD_MUTANT_RECORD") {
        let mut line = [0; 256];
        let thread = std::thread::current();
        let mut rest = &mut line[..];
        let _ = writeln!(rest, "{id} {:.200}", thread.name().unwrap_or("?"));
        let len = 256 - rest.len();
        let [openat, write, close] = CALLS;
        // SAFETY: plain system calls with memory of this function.
        unsafe {
            let errno = *__errno_location();
            let file = syscall(openat, -100, path.as_ptr(), 0o2_002_101, 0o644);
            syscall(write, file, line.as_ptr(), len);
            syscall(close, file);
            *__errno_location() = errno;
        }
    }
    false
}
"#;

#[cfg(test)]
mod tests {
    use super::rewrite;
    use crate::sites::find;

    fn text(source: &str, kinds: &[crate::sites::Kind]) -> String {
        let sites: Vec<_> = find("f.rs", source, 1)
            .unwrap()
            .into_iter()
            .filter(|site| kinds.contains(&site.kind))
            .collect();
        rewrite(source, &sites).0.replace("crate::pinfold_mutant::", "")
    }

    #[test]
    fn changes_that_contain_each_other_nest() {
        use crate::sites::Kind;
        let source = "fn f() -> bool { g(); a < b && c > d }";
        let changed = text(source, &[Kind::Operator, Kind::Statement]);
        assert_eq!(
            changed,
            "fn f() -> bool { if !on(1) { g(); } (if on(2) { a < b || c > d } else { (if on(3) { a <= b } else { a < b }) \
             && (if on(4) { c >= d } else { c > d }) }) }"
        );
        syn::parse_file(&changed).unwrap();
    }

    #[test]
    fn a_condition_is_true_or_false_and_its_operands_are_changed() {
        use crate::sites::Kind;
        let changed = text("fn f() { if a == 1 { g() } }", &[Kind::Condition, Kind::Number]);
        assert_eq!(
            changed,
            "fn f() { if (on(1) || (!on(2) && (a == (if on(4) { 2 } else { 1 })))) { g() } }"
        );
    }

    #[test]
    fn tests_constants_and_patterns_are_left_alone() {
        let source = "const A: u8 = 1 + 2; const fn f() -> u8 { 1 } #[cfg(test)] mod t { fn g() -> u8 { 1 + 1 } } \
                      fn h(x: [u8; 3]) { match x { [1, ..] => (), _ => () } }";
        assert!(find("f.rs", source, 1).unwrap().is_empty());
    }
}
