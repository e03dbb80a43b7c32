//! `POST /v1/place`: where dumps and their copies go.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::batch::{self, MOST};
use super::figure::Figure;
use super::quantity::Bytes;
use super::text::Text;

/// Dumps that are to be placed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Place)]
pub struct PlaceRequest<'a> {
    /// Dumps to place, at most 10,000. Each is answered as if it were alone.
    #[serde(borrow, deserialize_with = "batch::at_most::<MOST, _, _>")]
    #[schema(max_items = 10000)]
    pub placements: Vec<Placement<'a>>,
}

/// A dump that is to be placed: of a size, or of a job with the memory it has now.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Placement<'a> {
    /// Size of the dump, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<Bytes>,
    /// Job whose next full dump is placed, if no size is given: its size is predicted from the job's past and
    /// `resident_bytes`.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub job: Option<Text<'a>>,
    /// Kind of the job: jobs of a kind have dumps that are alike.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub program: Option<Text<'a>>,
    /// Resident memory of the task now, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resident_bytes: Option<Bytes>,
    /// Copies altogether, those on `holders` counted: 1 to 100.
    #[schema(minimum = 1, maximum = 100)]
    pub copies: u32,
    /// The node that takes the dump, if it can.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub local: Option<Text<'a>>,
    /// Nodes that have a copy already.
    #[serde(
        default,
        borrow,
        deserialize_with = "batch::at_most::<100, _, _>",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schema(value_type = Vec<String>, max_items = 100)]
    pub holders: Vec<Text<'a>>,
    /// Nodes that must not be chosen.
    #[serde(
        default,
        borrow,
        deserialize_with = "batch::at_most::<100, _, _>",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schema(value_type = Vec<String>, max_items = 100)]
    pub without: Vec<Text<'a>>,
}

/// Chosen nodes for the dumps of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PlaceAnswer<'a> {
    /// The node that answers.
    #[serde(borrow)]
    #[schema(value_type = String)]
    pub answered_by: Text<'a>,
    /// Age of the snapshot that the answer is made from, seconds.
    #[schema(minimum = 0)]
    pub age_s: f64,
    /// Placements in the order of the request.
    #[serde(borrow)]
    pub answers: Vec<Placed<'a>>,
}

/// Chosen nodes for one dump.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Placed<'a> {
    /// Size of the dump, as given or as predicted. Where it is unknown no node is chosen.
    pub size_bytes: Figure<u64>,
    /// Chosen nodes, the best first; without those that had a copy already.
    #[serde(borrow)]
    pub nodes: Vec<PlacedOn<'a>>,
    /// Copies for which there is no node.
    pub missing: u32,
    /// Nodes left out as too little is known of them.
    pub unranked: u32,
}

/// A node that was chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PlacedOn<'a> {
    /// Name of the node.
    #[serde(borrow)]
    #[schema(value_type = String)]
    pub node: Text<'a>,
    /// Time until the copy would be there, seconds: queue, fixed time, and write or (on a node other than `local`)
    /// network, whichever is slower, at the median.
    #[schema(minimum = 0)]
    pub arrives_in_s: f64,
    /// True if the copy counts towards durability.
    pub durable: bool,
}
