//! Copies of a dump on other stores, in one process: the real stores, over regions in memory, with a wire that is a
//! function call and a registry that is a list.

#![allow(missing_docs)]

mod content;
mod crashes;
mod durability;
mod fakes;
mod mislisted;
mod property;
mod reading;
mod replica;
