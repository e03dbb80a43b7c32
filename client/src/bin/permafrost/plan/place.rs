//! `permafrost plan place`: computes the nodes for a dump and its copies.

use clap::Args;
use permafrost_agent::host::arguments::parse_size;
use permafrost_api_types::place::{PlaceAnswer, PlaceRequest, Placed, Placement};
use permafrost_api_types::quantity::Bytes;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::table::{Align, Table};

use crate::api::{self, ApiArguments};
use crate::nodes::as_of;

pub(super) const EXAMPLES: &str = "\
ARRIVES IN is when a copy would be there, by what is queued and measured. Exit code 12 when there are fewer nodes with \
room than copies.

Examples:
    permafrost plan place --size 16G
    permafrost plan place --size 16G --copies 3 --local n1 --without n4
";

#[derive(Debug, Args)]
pub(super) struct PlaceArguments {
    /// Size of the dump, such as 512M or 16G.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: u64,
    /// Copies altogether.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=100))]
    copies: u32,
    /// The node that takes the dump, if it can.
    #[arg(long, value_name = "NODE")]
    local: Option<String>,
    /// A node that must not be chosen. Repeatable.
    #[arg(long, value_name = "NODE")]
    without: Vec<String>,
    #[command(flatten)]
    api: ApiArguments,
}

pub(super) fn place(context: &Context, arguments: &PlaceArguments) -> Result<(), Failure> {
    let client = arguments.api.client(context)?;
    let size = Bytes::try_from(arguments.size)
        .map_err(|error| Failure::new(Code::Invalid, error.to_string()))?;
    let answer = client.post(
        "/v1/place",
        &PlaceRequest {
            placements: vec![Placement {
                size_bytes: Some(size),
                copies: arguments.copies,
                local: arguments.local.clone().map(Into::into),
                without: arguments.without.iter().cloned().map(Into::into).collect(),
                ..Placement::default()
            }],
        },
    )?;
    let plan: PlaceAnswer<'_> = answer.read()?;
    api::print(context, &answer, || human_plan(&plan))?;
    match plan.answers.first() {
        Some(placed) => judge(placed),
        None => Err(Failure::new(Code::Internal, "the answer is empty")),
    }
}

/// Returns the failure for the exit code, if copies are missing.
fn judge(placed: &Placed<'_>) -> Result<(), Failure> {
    if placed.missing == 0 {
        return Ok(());
    }
    let missing = human::count(placed.missing.into(), "copy has", "copies have");
    let failure = Failure::new(Code::NotEnough, format!("not enough: {missing} no node"));
    Err(match placed.unranked {
        0 => failure,
        unranked => failure.hint(format!("too little is known of {unranked} nodes")),
    })
}

fn human_plan(plan: &PlaceAnswer<'_>) -> String {
    let mut table = Table::new([
        ("NODE", Align::Left),
        ("ARRIVES IN", Align::Right),
        ("COUNTS", Align::Left),
    ]);
    for node in plan.answers.iter().flat_map(|placed| &placed.nodes) {
        table.row([
            node.node.to_string(),
            human::seconds(node.arrives_in_s),
            (if node.durable { "yes" } else { "no: transient" }).to_owned(),
        ]);
    }
    table.render() + &as_of(&plan.answered_by, plan.age_s)
}

#[cfg(test)]
mod tests {
    use permafrost_api_types::figure::{Figure, Known};
    use permafrost_api_types::place::PlacedOn;

    use super::*;

    #[test]
    fn nodes_are_listed_and_missing_ones_exit() {
        let on = |node: &'static str, durable| PlacedOn {
            node: node.into(),
            arrives_in_s: 1.5,
            durable,
        };
        let mut placed = Placed {
            size_bytes: Figure::Known(Known {
                p50: 1,
                p95: 1,
                age_s: 0.0,
                samples: 0,
            }),
            nodes: vec![on("n1", true), on("n2", false)],
            missing: 0,
            unranked: 2,
        };
        assert!(judge(&placed).is_ok());
        placed.missing = 1;
        let failure = judge(&placed).unwrap_err();
        assert_eq!(failure.code, Code::NotEnough);
        assert_eq!(failure.message, "not enough: 1 copy has no node");
        assert!(failure.hint.contains("2 nodes"));
        let text = human_plan(&PlaceAnswer {
            answered_by: "n1".into(),
            age_s: 0.0,
            answers: vec![placed],
        });
        assert!(text.contains("n1        1.50 s  yes\n"), "{text}");
        assert!(text.contains("no: transient"));
    }
}
