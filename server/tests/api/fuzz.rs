//! Arbitrary requests cause no panic and no reply that the document does not describe.

use axum::http::StatusCode;
use proptest::prelude::*;
use serde_json::{Map, Value, json};

use crate::fixture::{Asked, asked, three_nodes};

const POSTS: [&str; 6] = [
    "/v1/estimate",
    "/v1/preempt",
    "/v1/resume",
    "/v1/place",
    "/v1/reserve",
    "/v1/figures",
];

/// Names of fields that some request knows, and one that none knows.
const FIELDS: [&str; 41] = [
    "tasks",
    "candidates",
    "checkpoints",
    "placements",
    "mechanisms",
    "nodes",
    "copies",
    "detail",
    "swaps",
    "wanted",
    "by",
    "delay_weight",
    "longest_delay_s",
    "may_wait",
    "preference",
    "lazy",
    "limit",
    "id",
    "node",
    "job",
    "program",
    "resident_bytes",
    "dirty_pages",
    "dirty_bytes_per_s",
    "full_bytes",
    "incremental_bytes",
    "progress_s",
    "progress_of_this_run",
    "process",
    "since_checkpoint_s",
    "remaining_s",
    "start_s",
    "grace_s",
    "holds",
    "cpu_millis",
    "memory_bytes",
    "size_bytes",
    "direction",
    "bytes",
    "write",
    "x",
];

fn scalar() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (0_u64..10_000_000_000).prop_map(Value::from),
        (0.0..1e4).prop_map(Value::from),
        prop::sample::select(vec![
            "a",
            "b",
            "c",
            "sort",
            "team/k-means@2",
            "full_dump",
            "kill",
            "local",
            "replicated",
            "totals",
            "p95",
            "write",
            "",
            "\u{0}",
            "ü",
        ])
        .prop_map(Value::from),
    ]
}

/// Generates any JSON made of these.
fn nested() -> impl Strategy<Value = Value> {
    scalar().prop_recursive(4, 48, 6, |inner| {
        let field = prop::sample::select(FIELDS.to_vec());
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::vec((field, inner), 0..6).prop_map(|fields| {
                let fields = fields
                    .into_iter()
                    .map(|(name, value)| (name.to_owned(), value));
                Value::Object(fields.collect::<Map<_, _>>())
            }),
        ]
    })
}

fn number() -> impl Strategy<Value = Value> + Clone {
    prop_oneof![
        (0_u64..100_000_000_000).prop_map(Value::from),
        (0.0..1e6).prop_map(Value::from),
        Just(json!(0)),
        Just(json!(1e12)),
        Just(json!(1_u64 << 60)),
    ]
}

/// Generates a task that is nearly valid.
fn task() -> impl Strategy<Value = Value> + Clone {
    let names = prop::sample::select(vec!["a", "b", "c", "nobody"]);
    let jobs = prop::sample::select(vec!["sort", "team/k-means", "none", ""]);
    let fields = prop::collection::btree_map(
        prop::sample::select(FIELDS[21..30].to_vec()),
        number(),
        0..9,
    );
    (
        prop::option::of(names),
        prop::option::of(jobs),
        fields,
        number(),
        number(),
    )
        .prop_map(|(node, job, fields, cpu, memory)| {
            let mut task = json!({"id": "t", "node": node, "job": job});
            for (name, value) in fields {
                task[name] = value;
            }
            task["holds"] = json!({"cpu_millis": cpu, "memory_bytes": memory});
            task
        })
}

/// Generates requests that are nearly valid.
fn likely() -> impl Strategy<Value = (&'static str, Value)> {
    let tasks = prop::collection::vec(task(), 0..12);
    let copies = prop::sample::select(vec!["local", "replicated"]);
    let preempt = (tasks.clone(), copies.clone(), prop::option::of((number(), number())), any::<bool>(), number()).prop_map(
        |(tasks, copies, wanted, may_wait, weight)| {
            let wanted = wanted.map(|(cpu, memory)| json!({"cpu_millis": cpu, "memory_bytes": memory}));
            let request = json!({"candidates": tasks, "copies": copies, "wanted": wanted, "may_wait": may_wait,
                                 "delay_weight": weight});
            ("/v1/preempt", request)
        },
    );
    let estimate = (tasks, copies).prop_map(|(tasks, copies)| {
        (
            "/v1/estimate",
            json!({"tasks": tasks, "copies": copies, "nodes": ["a", "b", "c"]}),
        )
    });
    let names = prop::sample::select(vec![
        "sort",
        "sort@7",
        "team/k-means@1",
        "team/k-means",
        "team/k-means@3",
        "",
        "@",
    ]);
    let resume = (
        prop::collection::vec(names, 0..9),
        prop::option::of(number()),
        any::<bool>(),
    )
        .prop_map(|(names, eager, all)| {
            let lazy = eager.map(|eager| json!({"eager_bytes": eager}));
            let mut request = json!({"checkpoints": names, "lazy": lazy});
            if all {
                request["nodes"] = json!(["c", "b", "a", "a"]);
            }
            ("/v1/resume", request)
        });
    let placement = (number(), 0_u32..5, any::<bool>()).prop_map(|(size, copies, local)| {
        json!({"size_bytes": size, "copies": copies, "local": local.then_some("c"), "holders": ["b"]})
    });
    let place = prop::collection::vec(placement, 0..9)
        .prop_map(|all| ("/v1/place", json!({"placements": all})));
    prop_oneof![preempt, estimate, resume, place]
}

/// Sends a request; the fixture checks the answer against the document.
fn answer(asked: &Asked, path: &str, body: Vec<u8>) -> StatusCode {
    let method = if path == "/v1/figures" { "PUT" } else { "POST" };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(asked.raw(method, path, body)).0
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn any_json_is_answered_or_refused(body in nested(), path in prop::sample::select(POSTS.to_vec())) {
        let status = answer(&asked(three_nodes()), path, serde_json::to_vec(&body).unwrap());
        prop_assert!(!status.is_server_error(), "{status}");
    }

    #[test]
    fn any_bytes_are_refused(body in prop::collection::vec(any::<u8>(), 0..200), path in prop::sample::select(POSTS.to_vec())) {
        let status = answer(&asked(three_nodes()), path, body);
        prop_assert!(!status.is_server_error(), "{status}");
    }

    #[test]
    fn what_is_nearly_right_is_answered_as_documented((path, body) in likely()) {
        let status = answer(&asked(three_nodes()), path, serde_json::to_vec(&body).unwrap());
        prop_assert!(!status.is_server_error(), "{status} {body}");
    }

    /// A cut or a changed byte in what was right.
    #[test]
    fn what_was_right_and_is_damaged_is_answered_or_refused((path, body) in likely(), at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<bool>()) {
        let mut body = serde_json::to_vec(&body).unwrap();
        let at = at.index(body.len());
        if cut {
            body.truncate(at);
        } else {
            body[at] = byte;
        }
        let status = answer(&asked(three_nodes()), path, body);
        prop_assert!(!status.is_server_error(), "{status}");
    }

    #[test]
    fn any_query_is_answered_or_refused(path in prop::sample::select(vec!["nodes", "jobs", "checkpoints"]), query in "[a-z0-9=&%@+.-]{0,40}", limit in any::<i32>()) {
        let asked = asked(three_nodes());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        for query in [query.clone(), format!("after={query}"), format!("job={query}&limit=1"), format!("limit={limit}")] {
            let (status, _) = runtime.block_on(asked.get(&format!("/v1/{path}?{query}")));
            prop_assert!(!status.is_server_error(), "{status}");
        }
    }
}
