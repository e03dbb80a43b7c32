//! Costs and decisions, compared with values worked out by hand.

mod costs;
mod placing;
mod resuming;
mod victims;

use serde_json::Value;

/// Returns the answer for one mechanism.
fn of<'a>(answer: &'a Value, mechanism: &str) -> &'a Value {
    let answers = answer["answers"].as_array().unwrap();
    let found = answers.iter().find(|one| one["mechanism"] == mechanism);
    found.unwrap_or_else(|| panic!("no {mechanism} in {answer:#}"))
}
