//! The `pinfold` program.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`args`], [`units`] | the command line, and how sizes are written |
//! | [`copy`], [`io`], [`doctor`], [`pools`] | the commands |
//! | [`target`], [`lane`] | what bytes are read from and written to; the requests in flight at one, and their times |
//! | [`account`], [`latency`] | what a run did, as text and as JSON |
//! | [`signal`], [`progress`], [`failure`] | stopping, showing, and saying what went wrong |
#![forbid(unsafe_code)]

mod account;
mod args;
mod copy;
mod io;
mod lane;
mod latency;
mod progress;
mod signal;
mod target;
mod units;

fn main() {}
