//! The meaning of the numbers in reports: [`Counter`]. Each struct of statistics has a table of
//! them.
//!
//! The struct, its documentation, the table, the printed rows, a program's JSON and the C
//! interface's reports have one source, the struct's definition by [`counters!`](crate::counters!),
//! so they do not differ.
//!
//! Counting is not done here. Owners count by plain stores in counters of their own; a report adds
//! them up, and is exact whenever the owners are quiet.
//!
//! ```
//! use pinfold_core::counters::{Counters, Kind, Unit};
//! use pinfold_core::invalidate::InvalidationStats;
//!
//! let waits = InvalidationStats::TABLE.iter().find(|counter| counter.name == "wait_ns");
//! let waits = waits.ok_or("no such counter")?;
//! assert_eq!((waits.kind, waits.unit), (Kind::Total, Unit::Nanoseconds));
//! InvalidationStats::default().for_each(&mut |counter, value| {
//!     println!("{} {value}", counter.name);
//! });
//! # Ok::<(), &str>(())
//! ```

use core::fmt;

/// A number of a report.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Counter {
    /// Its name, which is the field's: in JSON, and in C.
    pub name: &'static str,
    /// The way it changes.
    pub kind: Kind,
    /// Its unit.
    pub unit: Unit,
    /// Its name in a printed table; indented below the row that it is a part of.
    pub label: &'static str,
    /// Its meaning, in a sentence.
    pub meaning: &'static str,
}

/// The way a counter changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A count that grows: events so far.
    Total,
    /// A count that grows and shrinks: the current value.
    Level,
    /// The highest value so far.
    Peak,
}

/// The unit of a counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unit {
    /// Things: which ones, its meaning says.
    Count,
    /// Bytes.
    Bytes,
    /// Nanoseconds.
    Nanoseconds,
}

impl Kind {
    /// Returns the word for it, in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Total => "total",
            Self::Level => "level",
            Self::Peak => "peak",
        }
    }
}

impl Unit {
    /// Returns the word for it, in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Count => "count",
            Self::Bytes => "bytes",
            Self::Nanoseconds => "ns",
        }
    }
}

/// A struct of counters.
pub trait Counters {
    /// The counters, in their order.
    const TABLE: &'static [Counter];

    /// Calls `each` with every counter and its value, in the order of the table.
    fn for_each(&self, each: &mut dyn FnMut(&'static Counter, u64));

    /// Prints a row for each counter, name and value in columns, without an end of the last line.
    ///
    /// # Errors
    /// Those of the formatter.
    fn write_rows(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut result, mut end) = (Ok(()), "");
        self.for_each(&mut |counter, value| {
            if result.is_ok() {
                result = write!(f, "{end}{:<24}{value:>16}", counter.label);
                end = "\n";
            }
        });
        result
    }
}

/// Defines a struct of counters: `name: Kind Unit "label"` for each, with its meaning as
/// documentation. Fields behind `besides` are no counters.
#[macro_export]
macro_rules! counters {
    (
        $(#[$attribute:meta])*
        pub struct $struct:ident {
            $($(#[doc = $doc:literal])+ $field:ident: $kind:ident $unit:ident $label:literal,)+
        }
        $(besides { $($(#[$rest_attribute:meta])* $rest:ident: $type:ty,)+ })?
    ) => {
        $(#[$attribute])*
        pub struct $struct {
            $($(#[doc = $doc])+ pub $field: u64,)+
            $($($(#[$rest_attribute])* pub $rest: $type,)+)?
        }

        impl $crate::counters::Counters for $struct {
            const TABLE: &'static [$crate::counters::Counter] = &[
                $($crate::counters::Counter {
                    name: stringify!($field),
                    kind: $crate::counters::Kind::$kind,
                    unit: $crate::counters::Unit::$unit,
                    label: $label,
                    meaning: concat!($($doc),+).trim_ascii_start(),
                },)+
            ];

            fn for_each(
                &self,
                each: &mut dyn FnMut(&'static $crate::counters::Counter, u64),
            ) {
                let values = [$(self.$field),+];
                for (counter, value) in Self::TABLE.iter().zip(values) {
                    each(counter, value);
                }
            }
        }
    };
}

#[cfg(all(test, not(loom)))]
#[expect(unreachable_pub, reason = "the macro defines public structs")]
mod tests {
    use super::*;
    use alloc::string::ToString;
    use alloc::vec::Vec;

    counters! {
        /// An example.
        #[derive(Default)]
        pub struct Example {
            /// Things done,
            /// in two lines.
            done: Total Count "done",
            /// Bytes of these.
            done_bytes: Peak Bytes "  bytes",
        }
        besides {
            /// No counter.
            name: &'static str,
        }
    }

    impl fmt::Display for Example {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.write_rows(f)
        }
    }

    #[test]
    fn a_struct_its_table_and_its_rows_agree() {
        let example = Example { done: 7, done_bytes: 4096, name: "no counter" };
        assert_eq!(example.name, "no counter");
        assert_eq!(Example::TABLE[0].meaning, "Things done, in two lines.");
        let mut seen = Vec::new();
        example.for_each(&mut |counter, value| {
            seen.push((counter.name, counter.kind, counter.unit, value))
        });
        let expected =
            [("done", Kind::Total, Unit::Count, 7), ("done_bytes", Kind::Peak, Unit::Bytes, 4096)];
        assert_eq!(seen, expected);
        assert_eq!(
            example.to_string(),
            "done                                   7\n  bytes                             4096"
        );
    }
}
