//! The HTTP API over a source of plain data: what is answered is worked out by hand, and each answer is checked against
//! the document that the API gives of itself.

mod alike;
mod bad;
mod batches;
mod document;
mod fixture;
mod fresh;
mod fuzz;
mod lists;
mod page;
mod policies;
mod scopes;
