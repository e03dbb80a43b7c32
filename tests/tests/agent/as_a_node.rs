//! Commands that once needed a storage node: they work through an agent as far as its certificate allows.

use permafrost_tests::daemon::Daemon;

use super::common::*;
use super::{Site, refusal, text};

#[test]
fn what_a_storage_node_does_an_agent_does_too() {
    let site = Site::new(1);
    let agent = site.agent("compute", "*", &[]);
    let stranger = site.agent("other", "others", &[]);
    let memory = pages(5, 400);
    dump_and_adopt(&agent, site.work(), "team/x", 0x40_0000, &memory);
    let images = site.path("exported");
    agent.run(&["get", "team/x", text(&images)]).unwrap();

    // An images directory of the compute node's own.
    let put = agent.json(&["put", "team/copy", text(&images)]).unwrap();
    assert_eq!(
        (put["job"].as_str(), put["generation"].as_u64()),
        (Some("team/copy"), Some(1))
    );
    assert!(exported_pages(&agent, site.work(), "team/copy") == memory);
    let again = agent.json(&["put", "team/copy", text(&images)]).unwrap();
    assert_eq!(
        again["parent_bytes"],
        memory.len(),
        "compared by the node: {again}"
    );
    assert_eq!(
        refusal(&stranger, &["put", "team/copy", text(&images)]).0,
        9
    );
    std::fs::write(images.join("pagemap-4711.img"), "damaged").unwrap();
    assert_eq!(refusal(&agent, &["put", "team/bad", text(&images)]).0, 2);
    // The job is free again.
    agent.run(&["open", "--job", "team/bad"]).unwrap();

    // What it reads and heals is the operator's to say.
    assert_eq!(refusal(&agent, &["scrub"]).0, 9);
    let operator = site.agent_of_role("operator", "operator", "team", &[]);
    assert_eq!(operator.json(&["scrub"]).unwrap()["checkpoints"], 3);

    // The API, as whom the certificate names.
    let nodes = agent.json(&["nodes"]).unwrap();
    assert_eq!(nodes["nodes"].as_array().unwrap().len(), 1, "{nodes}");
    // Nothing was measured yet on which a plan or a cost could be known: then the answer says what is missing.
    let plan = agent.try_run(&["plan", "resume", "team/x"]).unwrap();
    assert!(matches!(plan.status.code(), Some(0 | 11)), "{plan:?}");
    let said = [&plan.stdout[..], &plan.stderr[..]].concat();
    assert!(
        plan.status.success() || String::from_utf8_lossy(&said).contains("has not been measured"),
        "{plan:?}"
    );
    // As if there were no such job.
    assert_eq!(refusal(&stranger, &["plan", "resume", "team/x"]).0, 3);
    let pid = std::process::id().to_string();
    let cost = agent
        .try_run(&["cost", "--pid", &pid, "--job", "team/x"])
        .unwrap();
    assert!(matches!(cost.status.code(), Some(0 | 11)), "{cost:?}");
}

#[test]
fn an_agent_without_nodes_says_so_on_its_api_too() {
    let site = Site::new(0);
    let identity = site.issue("compute", "agent", Some("*"));
    let arguments = [
        "--identity".to_owned(),
        text(&identity).to_owned(),
        "--node=node-0=127.0.0.1:9".to_owned(),
        "--deadline=1s".to_owned(),
    ];
    let agent = Daemon::agent(&site.path("compute"), &arguments).unwrap();
    let (code, said) = refusal(&agent, &["nodes"]);
    assert_eq!(code, 11, "{said}");
}
