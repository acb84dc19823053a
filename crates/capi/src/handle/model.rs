//! The table under the model checker: the orders of the calls of two and three threads, and every
//! value that the memory model lets them read.

use super::*;
use loom::cell::UnsafeCell as Checked;
use loom::thread;
use std::sync::Arc;

/// Explores every order of the calls with at most three preemptions: with more, a call that looks at
/// the name first has too many orders for three threads.
fn explore(body: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(body);
}

/// An object whose uses the model checker compares: a write, as its end is, beside any other use
/// fails.
struct Object {
    value: u64,
    alive: Checked<bool>,
}

// SAFETY: the model checker checks each access to the cell.
unsafe impl Sync for Object {}

impl Object {
    fn new(value: u64) -> Self {
        Self { value, alive: Checked::new(true) }
    }

    fn read(&self) {
        // SAFETY: checked by the model checker.
        self.alive.with(|alive| assert!(unsafe { *alive }));
    }

    fn write(&mut self) {
        // SAFETY: checked by the model checker.
        self.alive.with_mut(|alive| assert!(unsafe { *alive }));
        self.value += 1;
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: checked by the model checker.
        self.alive.with_mut(|alive| unsafe { *alive = false });
    }
}

/// The way an object is removed: as the table does, or a wrong one.
#[derive(Clone, Copy)]
enum Removal {
    Right,
    /// Without regard to calls that use it.
    AtOnce,
    /// The slot's generation does not change with its next object.
    SameGeneration,
}

impl Removal {
    fn remove(self, table: &Table<Object>, handle: *mut Object) -> Result<Object, Failure> {
        let removed = match self {
            Self::AtOnce => {
                let (slot, generation) = table.find(handle)?;
                table.check(slot.word.load(Ordering::Acquire), generation)?;
                // SAFETY: none: this is what the model checker must find.
                let removed = unsafe { (*slot.object.get()).take() };
                slot.word.store((generation + 1) << GENERATION_SHIFT, Ordering::Release);
                table.vacant.lock().unwrap().used.push_back(0);
                removed.ok_or_else(|| table.stale(generation))?
            }
            _ => table.remove(handle, |_| Ok(()))?,
        };
        if matches!(self, Self::SameGeneration) {
            let (slot, generation) = table.find(handle)?;
            slot.word.store((generation - 1) << GENERATION_SHIFT, Ordering::Release);
        }
        Ok(removed)
    }
}

/// A table with one object, and the address that is its handle: pointers do not move to threads.
fn one(value: u64) -> (Arc<Table<Object>>, usize) {
    let table = Arc::new(Table::new(1, "object"));
    let handle = table.insert(Object::new(value)).unwrap();
    (table, handle.addr())
}

/// One thread uses an object while another removes it.
fn use_beside_removal(removal: Removal) {
    explore(move || {
        let (table, handle) = one(1);
        let other = Arc::clone(&table);
        let user = thread::spawn(move || match other.get(without_provenance_mut(handle)) {
            Ok(object) => {
                object.read();
                assert_eq!(object.value, 1);
            }
            Err(failure) => assert_eq!(failure.errno(), libc::EBADF),
        });
        let removed = loop {
            match removal.remove(&table, without_provenance_mut(handle)) {
                Ok(removed) => break removed,
                Err(failure) => assert_eq!(failure.errno(), libc::EBUSY),
            }
            thread::yield_now();
        };
        assert_eq!(removed.value, 1);
        drop(removed);
        user.join().unwrap();
        let late = table.get(without_provenance_mut(handle));
        assert_eq!(late.err().unwrap().errno(), libc::EBADF);
    });
}

#[test]
fn loom_an_object_is_not_removed_while_a_call_uses_it() {
    use_beside_removal(Removal::Right);
}

#[test]
#[should_panic]
fn loom_a_removal_that_does_not_wait_for_users_is_caught() {
    use_beside_removal(Removal::AtOnce);
}

/// One thread keeps an old handle while another replaces the object in the same slot.
fn stale_use(removal: Removal) {
    explore(move || {
        let (table, handle) = one(1);
        let other = Arc::clone(&table);
        let user = thread::spawn(move || {
            for exclusive in [false, true] {
                let handle = without_provenance_mut(handle);
                let value = if exclusive {
                    other.get_mut(handle).map(|object| object.value)
                } else {
                    other.get(handle).map(|object| object.value)
                };
                match value {
                    Ok(value) => assert_eq!(value, 1),
                    Err(failure) => assert_eq!(failure.errno(), libc::EBADF),
                }
            }
        });
        if let Ok(removed) = removal.remove(&table, without_provenance_mut(handle)) {
            drop(removed);
            let second = table.insert(Object::new(2)).unwrap();
            let object = table.get(second);
            // Refused at most while the other thread has it alone, which it must not.
            assert_eq!(object.map(|object| object.value).map_err(|failure| failure.errno()), Ok(2));
        }
        user.join().unwrap();
    });
}

#[test]
fn loom_a_stale_handle_never_reaches_the_next_object() {
    stale_use(Removal::Right);
}

#[test]
#[should_panic]
fn loom_a_generation_that_does_not_change_is_caught() {
    stale_use(Removal::SameGeneration);
}

#[test]
fn loom_a_call_that_has_an_object_alone_meets_no_other() {
    explore(|| {
        let (table, handle) = one(0);
        let alone = |table: Arc<Table<Object>>| {
            move || match table.get_mut(without_provenance_mut(handle)) {
                Ok(mut object) => {
                    object.write();
                    1
                }
                Err(failure) => {
                    assert_eq!(failure.errno(), libc::EBUSY);
                    0
                }
            }
        };
        let other = Arc::clone(&table);
        let reader = thread::spawn(move || match other.get(without_provenance_mut(handle)) {
            Ok(object) => object.read(),
            Err(failure) => assert_eq!(failure.errno(), libc::EBUSY),
        });
        let writer = thread::spawn(alone(Arc::clone(&table)));
        let written = alone(Arc::clone(&table))() + writer.join().unwrap();
        reader.join().unwrap();
        assert_eq!(table.get(without_provenance_mut(handle)).unwrap().value, written);
    });
}

#[test]
fn loom_no_call_is_refused_for_a_removal_that_is() {
    explore(|| {
        let (table, handle) = one(1);
        let other = Arc::clone(&table);
        let user = thread::spawn(move || {
            other.get(without_provenance_mut(handle)).unwrap().read();
            other.get_mut(without_provenance_mut(handle)).unwrap().write();
        });
        let refused = table.remove(without_provenance_mut(handle), |object| {
            object.read();
            Err(fail!(EAGAIN, "in use"))
        });
        assert!([libc::EAGAIN, libc::EBUSY].contains(&refused.err().unwrap().errno()));
        user.join().unwrap();
        assert_eq!(table.get(without_provenance_mut(handle)).unwrap().value, 2);
    });
}

#[test]
fn loom_an_object_is_removed_by_one_of_the_threads_that_try() {
    explore(|| {
        let (table, handle) = one(1);
        let remove = |table: Arc<Table<Object>>| {
            move || match table.remove(without_provenance_mut(handle), |_| Ok(())) {
                Ok(_) => 1,
                Err(failure) => {
                    assert_eq!(failure.errno(), libc::EBADF);
                    0
                }
            }
        };
        let other = thread::spawn(remove(Arc::clone(&table)));
        let removed = remove(table)() + other.join().unwrap();
        assert_eq!(removed, 1);
    });
}
