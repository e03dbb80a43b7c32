//! Policies decide over HTTP as they do in the library, over the same cluster.

use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode};
use permafrost_scheduling::NodeId;
use permafrost_scheduling::cost::{NodeFigures, SwapFigures, TaskResources};
use permafrost_scheduling::estimator::SizedRates;
use permafrost_scheduling::figure::Figure;
use permafrost_scheduling::policy::{
    ClusterEvent, Decision, Name, PolicySettings, SchedulerView, Score, TaskAction, TaskCheckpoint,
    TaskView,
};
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Moment, Seconds};
use serde_json::{Value, json};

use crate::fixture::{Asked, asked, pointers, three_nodes};

const MIB: u64 = 1 << 20;
const NOW: Moment = Moment::from_micros(1 << 40);

/// Deterministic numbers that look random.
struct Draw(u64);

impl Draw {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// A cluster for the library, and the same one as a request.
struct Both {
    view: SchedulerView,
    wanted: TaskResources,
    request: Value,
}

/// Makes times that are sums of powers of two, so that no order of adding them rounds.
fn time(draw: &mut Draw, most: u64) -> Seconds {
    Seconds::from_millis(draw.below(most) * 250)
}

fn both(draw: &mut Draw) -> Both {
    let mut view = SchedulerView::default();
    let (mut figures, mut swaps, mut candidates) = (Vec::new(), Vec::new(), Vec::new());
    let nodes = 1 + draw.below(4);
    let shapes: Vec<(u64, u64)> = (0..draw.below(12))
        .map(|_| (draw.below(nodes), draw.below(5)))
        .collect();
    let holds: Vec<TaskResources> = shapes
        .iter()
        .map(|_| TaskResources {
            cpu_millis: 500 * (1 + draw.below(4)),
            memory: Bytes::new(draw.below(64) * 64 * MIB),
        })
        .collect();
    for n in 0..nodes {
        let mut rate = || BytesPerSecond::new(((1 + draw.below(16)) * 64 * MIB) as f64).unwrap();
        let (write, read, paging) = (rate(), rate(), rate());
        let queue = Bytes::new(draw.below(8) * 256 * MIB);
        let held = shapes.iter().zip(&holds).filter(|(shape, _)| shape.0 == n);
        let held = held.fold(TaskResources::ZERO, |sum, (_, holds)| sum.plus(*holds));
        let id = view.add_node(
            held,
            NodeFigures {
                write: SizedRates::uniform(Figure::given(write)),
                read: SizedRates::uniform(Figure::given(read)),
                write_queue: Figure::given(queue),
                write_drain: Figure::given(write),
                read_drain: Figure::given(read),
                ..NodeFigures::unknown(NodeId(0))
            },
        );
        let (free_memory, free_swap) = (
            Bytes::new(draw.below(4) * 256 * MIB),
            Bytes::new(draw.below(64) * 256 * MIB),
        );
        let name = format!("node-{n}");
        view.node_mut(id).unwrap().swap = Some(SwapFigures {
            free_memory,
            free_swap,
            write: Figure::given(paging),
            read: Figure::given(paging),
        });
        swaps.push(
            json!({"node": name, "free_memory_bytes": free_memory, "free_swap_bytes": free_swap,
                          "write_bytes_per_s": paging, "read_bytes_per_s": paging}),
        );
        figures.push(
            json!({"node": name, "write_bytes_per_s": write, "read_bytes_per_s": read,
                            "write_queue_bytes": queue}),
        );
    }
    let mut jobs = std::collections::BTreeMap::new();
    for (index, ((node, job), holds)) in shapes.into_iter().zip(holds).enumerate() {
        let deadline = Seconds::from_millis(1000 * (100 + 50 * job));
        let of = *jobs
            .entry(job)
            .or_insert_with(|| view.add_job(Some(NOW.after(deadline))));
        let (done, left) = (time(draw, 8000), time(draw, 8000));
        let mut task = TaskView::new(of, NOW.before(done), holds);
        let node_id = NodeId(u32::try_from(node).unwrap());
        let priority = u8::try_from(draw.below(3)).unwrap();
        task.priority = priority;
        task.memory = Bytes::new((1 + draw.below(64)) * 64 * MIB);
        task.done = done;
        task.work = Some(done.plus(left));
        let memory = task.memory;
        let since = Seconds::from_millis(draw.below(40) * 250);
        let has_checkpoint = draw.below(3) == 0 && since <= done;
        if has_checkpoint {
            task.checkpoint = Some(TaskCheckpoint {
                node: node_id,
                bytes: memory,
                done: done.less(since),
            });
        }
        let id = view.submit(task).unwrap();
        view.begin(id, node_id).unwrap();
        view.runs(id, NOW).unwrap();
        let mut candidate = json!({
            "id": format!("task-{index}"), "node": format!("node-{node}"), "group": format!("job-{job}"),
            "deadline_s": deadline, "priority": priority, "resident_bytes": memory, "full_bytes": memory,
            "progress_s": done, "remaining_s": left,
            "holds": {"cpu_millis": holds.cpu_millis, "memory_bytes": holds.memory},
        });
        if has_checkpoint {
            candidate["since_checkpoint_s"] = json!(since);
            // The stand-in for the store would predict one.
            let figures = view.task(id).unwrap().figures(id, NOW);
            assert!(figures.incremental.known().is_err());
            candidate["incremental_bytes"] = json!(memory);
            let given = permafrost_scheduling::cost::TaskFigures {
                incremental: Figure::given(memory),
                ..figures
            };
            give(&mut view, id, given);
        }
        candidates.push(candidate);
    }
    let wanted = TaskResources {
        cpu_millis: 500 * draw.below(12),
        memory: Bytes::new(draw.below(64) * 256 * MIB),
    };
    let request = json!({
        "figures": figures, "swaps": swaps, "candidates": candidates, "detail": "totals",
        "wanted": {"cpu_millis": wanted.cpu_millis, "memory_bytes": wanted.memory},
    });
    Both {
        view,
        wanted,
        request,
    }
}

/// Gives figures of a task that the view does not derive.
fn give(
    view: &mut SchedulerView,
    id: permafrost_scheduling::TaskId,
    given: permafrost_scheduling::cost::TaskFigures,
) {
    let mut json = serde_json::to_value(&*view).unwrap();
    json["tasks"][usize::try_from(id.0).unwrap()]["given"] = serde_json::to_value(given).unwrap();
    *view = serde_json::from_value(json).unwrap();
}

fn score(of: Score) -> Value {
    let rounded = |time: Seconds| (time.value() * 1e9).round() / 1e9;
    match of {
        Score::Lost(time) => json!({"lost_s": rounded(time)}),
        Score::Left(time) => json!({"left_s": rounded(time)}),
        Score::Later(time) => json!({"later_s": rounded(time)}),
        Score::Order(order) => json!({"order": order}),
        Score::Moved(bytes) => json!({"moved_bytes": bytes}),
        Score::Containers(count) => json!({"containers": count}),
    }
}

fn action(of: TaskAction) -> Value {
    use permafrost_scheduling::cost::{Dump, PreemptionMechanism as Mechanism};
    match of {
        TaskAction::Preempt(mechanism) => json!({"preempt": match mechanism {
            Mechanism::Wait => "wait",
            Mechanism::Kill => "kill",
            Mechanism::Rollback => "rollback",
            Mechanism::SuspendInMemory => "suspend_in_memory",
            Mechanism::Checkpoint { dump: Dump::Full, .. } => "full_dump",
            Mechanism::Checkpoint { dump: Dump::Incremental, .. } => "incremental_dump",
            Mechanism::Checkpoint { dump: Dump::PreCopied, .. } => "pre_copied_dump",
        }}),
        TaskAction::Resize(to) => {
            json!({"resize": {"cpu_millis": to.cpu_millis, "memory_bytes": to.memory}})
        }
        other => panic!("{other} of a task that runs"),
    }
}

/// Returns what an answer says of a decision of the library.
fn expected(decision: &Decision) -> Value {
    let task = |id: permafrost_scheduling::TaskId| format!("task-{}", id.0);
    let runner_up = decision.runner_up.map(|next| {
        json!({"task": task(next.task), "action": action(next.action), "score": score(next.score)})
    });
    json!({
        "task": task(decision.task), "node": format!("node-{}", decision.node.0),
        "action": action(decision.action), "score": score(decision.score), "runner_up": runner_up,
        "reason": decision.reason.to_string(),
    })
}

async fn answer(asked: &Asked, request: &Value) -> Value {
    let request = Request::post("/v1/preempt")
        .header("content-type", "application/json")
        .body(Body::from(request.to_string()))
        .unwrap();
    let response = asked.send(request).await;
    let status = response.status();
    let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    let answer: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(status, 200, "{answer:#}");
    answer
}

#[tokio::test]
async fn the_library_and_the_api_decide_alike_over_ten_thousand_clusters() {
    let asked = asked(three_nodes());
    let mut decided = 0;
    for seed in 0..10_000_u64 {
        let mut draw = Draw(seed);
        let Both {
            view,
            wanted,
            mut request,
        } = both(&mut draw);
        let at = usize::try_from(seed).unwrap() % Name::ALL.len();
        let policy = Name::ALL[at];
        let settings = PolicySettings {
            seed,
            ..PolicySettings::default()
        };
        let decisions =
            policy
                .build(&settings)
                .decide(NOW, ClusterEvent::Wanted(wanted, None), &view);
        let expected: Vec<Value> = decisions.iter().map(expected).collect();
        request["policy"] = json!(policy.as_str());
        request["seed"] = json!(seed);
        let answer = answer(&asked, &request).await;
        let mut said = answer["decisions"].clone();
        for one in said.as_array_mut().unwrap() {
            let one = one.as_object_mut().unwrap();
            one.remove("cost");
            one.remove("frees");
            one.entry("runner_up").or_insert(Value::Null);
        }
        assert_eq!(said, json!(expected), "seed {seed}, {policy}: {request:#}");
        if policy.as_str().starts_with("adaptive") {
            // The plan of a request without a policy, and its decisions.
            let of = |list: &Value| -> Vec<Value> {
                list.as_array()
                    .unwrap()
                    .iter()
                    .map(|one| one["task"].clone())
                    .collect()
            };
            assert_eq!(
                of(&answer["victims"]),
                of(&answer["decisions"]),
                "seed {seed}"
            );
        }
        decided += expected.len();
    }
    assert!(decided > 5_000, "{decided}: too few decisions to compare");
}

#[tokio::test]
async fn a_policy_is_refused_what_it_cannot_do_without() {
    let asked = asked(three_nodes());
    let task = json!({"id": "k", "node": "b", "holds": {"cpu_millis": 1000}});
    for (policy, more, pointer) in [
        ("fifo", json!({}), "/policy"),
        ("mdf+llf", json!({}), "/policy"),
        ("kill", json!({}), "/candidates/0/progress_s"),
        (
            "mr+srt",
            json!({"progress_s": 5, "remaining_s": 7}),
            "/candidates/0/group",
        ),
        (
            "mr+srt",
            json!({"progress_s": 5, "group": "j"}),
            "/candidates/0/remaining_s",
        ),
        ("mdf", json!({"group": "j"}), "/candidates/0/deadline_s"),
        (
            "li2015",
            json!({"progress_s": 5}),
            "/candidates/0/resident_bytes",
        ),
        (
            "suspend",
            json!({"progress_s": 5, "resident_bytes": 7}),
            "/swaps",
        ),
    ] {
        let mut task = task.clone();
        task.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let request = json!({"policy": policy, "wanted": {"cpu_millis": 1}, "candidates": [task]});
        let (status, problem) = asked.post("/v1/preempt", &request).await;
        assert_eq!(
            (status.as_u16(), pointers(&problem)),
            (422, vec![pointer]),
            "{policy}: {problem}"
        );
    }
    for (more, pointer) in [
        (json!({}), "/wanted"),
        (json!({"wanted": {}, "copies": "replicated"}), "/copies"),
        (json!({"wanted": {}, "by": "p95"}), "/policy"),
    ] {
        let mut request = json!({"policy": "kill", "candidates": []});
        request
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let (_, problem) = asked.post("/v1/preempt", &request).await;
        assert_eq!(pointers(&problem), [pointer], "{problem}");
    }
}

#[tokio::test]
async fn a_policy_that_stores_sets_the_preference_and_others_are_refused() {
    let asked = asked(three_nodes());
    let with =
        |policy: &str| json!({"checkpoints": ["team/k-means"], "limit": 1, "policy": policy});
    for (policy, node) in [("local", "a"), ("basic+remote", "b"), ("li2015", "a")] {
        let answer = asked.ok("/v1/resume", &with(policy)).await;
        assert_eq!(answer["answers"][0]["nodes"][0]["node"], node, "{policy}");
    }
    for (policy, word) in [("kill", "does not choose"), ("fifo", "there is no policy")] {
        let (status, problem) = asked.post("/v1/resume", &with(policy)).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
        assert!(problem.to_string().contains(word), "{problem}");
        assert!(problem.to_string().contains("/policy"), "{problem}");
    }
    let mut both = with("local");
    both["preference"] = json!("remote");
    let (_, problem) = asked.post("/v1/resume", &both).await;
    assert!(problem.to_string().contains("/preference"), "{problem}");
}

#[tokio::test]
async fn a_grace_that_a_policy_does_not_heed_and_a_long_id_are_refused() {
    let asked = asked(three_nodes());
    let request = |policy: &str, id: &str| {
        json!({
            "wanted": {"cpu_millis": 1000},
            "policy": policy,
            "candidates": [{
                "id": id, "node": "a", "progress_s": 100, "full_bytes": MIB, "resident_bytes": MIB, "grace_s": 5,
                "holds": {"cpu_millis": 1000, "memory_bytes": MIB},
            }],
        })
    };
    let (status, problem) = asked.post("/v1/preempt", &request("kill", "t")).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(pointers(&problem), ["/candidates/0/grace_s"]);
    asked.ok("/v1/preempt", &request("adaptive", "t")).await;
    let id = "t".repeat(1025);
    let (status, problem) = asked.post("/v1/preempt", &request("adaptive", &id)).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(pointers(&problem), ["/candidates/0/id"]);
}

#[tokio::test]
async fn what_algorithm_1_cannot_decide_about_is_named() {
    let asked = asked(three_nodes());
    let task = |id: &str, node: &str| {
        json!({"id": id, "node": node, "progress_s": 100, "resident_bytes": 64 * MIB,
               "holds": {"cpu_millis": 1000}})
    };
    let known = json!({"node": "known", "write_bytes_per_s": 1e9, "read_bytes_per_s": 1e9, "write_queue_bytes": 0});
    let figures = |more: Value| {
        let mut other = json!({"node": "other", "write_queue_bytes": 0});
        let more = more.as_object().unwrap().clone();
        other.as_object_mut().unwrap().extend(more);
        json!([known, other])
    };
    for (more, reason) in [
        (json!({"write_bytes_per_s": 1e9}), "bandwidth for reading"),
        (json!({"read_bytes_per_s": 1e9}), "bandwidth for writing"),
    ] {
        let mut request = json!({
            "policy": "li2015", "wanted": {"cpu_millis": 2000}, "figures": figures(more),
            "candidates": [task("a", "known"), task("b", "other")],
        });
        let answer = asked.ok("/v1/preempt", &request).await;
        assert_eq!(answer["decisions"].as_array().unwrap().len(), 1, "{answer}");
        assert_eq!(answer["undecided"][0]["task"], "b");
        let said = answer["undecided"][0]["reason"].as_str().unwrap();
        assert!(said.contains(reason), "{said}");
        assert_eq!(answer["enough"], false);
        // The others do not go by it.
        request["policy"] = json!("kill");
        let answer = asked.ok("/v1/preempt", &request).await;
        assert_eq!(answer["undecided"], json!([]));
        assert_eq!(answer["enough"], true);
    }
}

#[tokio::test]
async fn dumps_that_a_policy_decides_on_wait_for_each_other_on_their_node() {
    let asked = asked(three_nodes());
    let task = |id: &str, node: &str| {
        json!({"id": id, "node": node, "progress_s": 100, "full_bytes": 1_000_000_000_u64,
               "holds": {"cpu_millis": 1000}})
    };
    let node = |name: &str| {
        json!({"node": name, "write_bytes_per_s": 1e9, "read_bytes_per_s": 1e9, "write_queue_bytes": 0,
               "read_queue_bytes": 0, "dump_start_s": 0, "restore_start_s": 0})
    };
    let request = json!({
        "policy": "basic", "wanted": {"cpu_millis": 3000}, "figures": [node("x"), node("y")],
        "candidates": [task("a", "x"), task("b", "x"), task("c", "y")],
    });
    let answer = asked.ok("/v1/preempt", &request).await;
    let delays: Vec<f64> = (answer["decisions"].as_array().unwrap().iter())
        .map(|decision| decision["cost"]["delay_s"]["p50"].as_f64().unwrap().round())
        .collect();
    assert_eq!(delays, [1.0, 2.0, 1.0], "{answer}");
}

#[tokio::test]
async fn bandwidths_by_size_go_before_one_for_all_sizes() {
    let asked = asked(three_nodes());
    let request = |more: Value| {
        let mut node = json!({"node": "x", "write_queue_bytes": 0, "read_queue_bytes": 0, "dump_start_s": 0,
                              "restore_start_s": 0, "read_bytes_per_s": 1e9});
        let more = more.as_object().unwrap().clone();
        node.as_object_mut().unwrap().extend(more);
        json!({"policy": "basic", "wanted": {"cpu_millis": 1000}, "figures": [node], "candidates": [
            {"id": "a", "node": "x", "progress_s": 100, "full_bytes": 2_000_000_000_u64,
             "holds": {"cpu_millis": 1000}}]})
    };
    let delay = async |more: Value| {
        let answer = asked.ok("/v1/preempt", &request(more)).await;
        answer["decisions"][0]["cost"]["delay_s"].clone()
    };
    let large =
        json!([{"size_bytes": 2_000_000_000_u64, "p50_bytes_per_s": 1e9, "p95_bytes_per_s": 5e8}]);
    let small = json!([{"size_bytes": 1000, "p50_bytes_per_s": 1e9}]);
    let uniform = delay(json!({"write_bytes_per_s": 2e9})).await;
    assert_eq!(uniform["p50"], 1.0);
    let by_size = delay(json!({"write_bytes_per_s": 2e9, "write_by_size": large})).await;
    assert_eq!(
        (&by_size["p50"], &by_size["p95"]),
        (&json!(2.0), &json!(4.0))
    );
    let other = delay(json!({"write_bytes_per_s": 2e9, "write_by_size": small})).await;
    assert_eq!(other, uniform);
    let mut many = request(json!({}));
    many["figures"][0]["read_by_size"] = json!(vec![large[0].clone(); 17]);
    let (status, _) = asked.post("/v1/preempt", &many).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
}
