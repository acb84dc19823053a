//! The built program, run as a user runs it.

#[cfg(test)]
mod around;
#[cfg(test)]
mod bad_input;
#[cfg(test)]
mod bench;
#[cfg(test)]
mod common;
#[cfg(test)]
mod copy;
#[cfg(test)]
mod fio;
#[cfg(test)]
mod io;
#[cfg(test)]
mod jobs;
#[cfg(test)]
mod nvme;
#[cfg(test)]
mod replay;
#[cfg(test)]
mod serve;
#[cfg(test)]
mod signals;
#[cfg(test)]
mod streams;
