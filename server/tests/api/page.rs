//! The page in a real Chromium, over the API's own server and routes, with a large cluster of plain data behind them.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::time::Instant;

use permafrost_http_api::serve::{self, ServeOptions};
use permafrost_http_api::{Api, router};
use permafrost_tests::browser::{self, Browser};
use serde_json::json;

use crate::fixture::{Plain, checkpoint, node};

/// A token, and its SHA-256.
const TOKEN: &str = "pft-scale";
const TOKEN_SHA256: &str = "1f347284328388a228bca88e693afa5ee44bbef4f70991bb400dbd96ff424529";

/// Most rows of a view.
const ROWS: u64 = 100;

fn wait_rows(browser: &Browser, hash: &str, first: &str) -> u64 {
    browser
        .run("location.hash = arguments[0]", &[json!(hash)])
        .unwrap();
    let shown = format!(
        "return document.querySelector('tbody th')?.textContent === {first:?} && !document.getElementById('view').ariaBusy"
    );
    browser.wait(hash, &shown).unwrap();
    let count = "return document.querySelectorAll('main tr').length - document.querySelectorAll('main thead tr').length";
    browser.run(count, &[]).unwrap().as_u64().unwrap()
}

#[test]
fn views_of_a_thousand_nodes_and_a_hundred_thousand_checkpoints_are_bounded() {
    let test = "views_of_a_thousand_nodes_and_a_hundred_thousand_checkpoints_are_bounded";
    if !browser::for_test(test) {
        return;
    }
    let nodes = (0..1_000).map(|n| node(&format!("n{n:04}"), (1.0, 2.0), (1, 1)));
    // One job with 10,000 generations among 90,000 jobs with one.
    let many = (1..=10_000).map(|generation| checkpoint("a-many", generation, 1, &["n0001"]));
    let jobs = (0..90_000).map(|n| checkpoint(&format!("job-{n:05}"), 1, 1, &["n0002", "n0003"]));
    let source = Plain::new(nodes.collect(), many.chain(jobs).collect());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let work = tempfile::tempdir().unwrap();
    let tokens = work.path().join("tokens");
    std::fs::write(&tokens, format!("scale read {TOKEN_SHA256}\n")).unwrap();
    std::fs::set_permissions(&tokens, std::fs::Permissions::from_mode(0o600)).unwrap();
    let options = ServeOptions {
        run_dir: work.path().to_owned(),
        listen: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
        tokens: Some(tokens),
        ..ServeOptions::default()
    };
    let served = serve::serve(options, router(Api::looked_once(source)));
    let server = runtime.block_on(served).unwrap();
    let page = format!("http://{}/ui", server.address().unwrap());

    let browser = Browser::start().unwrap();
    browser.open(&page).unwrap();
    let keep = "sessionStorage.setItem('permafrost-token', arguments[0])";
    browser.run(keep, &[json!(TOKEN)]).unwrap();
    for (hash, first) in [("", "n0000"), ("#/jobs", "a-many")] {
        // A page that is opened, not a view that is changed.
        browser.open("about:blank").unwrap();
        browser.open(&format!("{page}{hash}")).unwrap();
        let shown = format!("return document.querySelector('tbody th')?.textContent === {first:?}");
        browser.wait("the first rows", &shown).unwrap();
        let times = "const paint = performance.getEntriesByName('first-contentful-paint')[0]?.startTime; const last = performance.getEntriesByType('resource').map((one) => one.responseEnd); return [paint, Math.max(...last)]";
        let times = browser.run(times, &[]).unwrap();
        println!("{page}{hash}: first contentful paint and last answer after {times} ms");
    }
    let begun = Instant::now();
    for (hash, first, rows) in [
        ("#/nodes", "n0000", ROWS),
        ("#/nodes/n0899", "n0900", ROWS),
        ("#/jobs", "a-many", ROWS),
        ("#/jobs/job-50000", "job-50001", ROWS),
        ("#/job/a-many", "a-many@1", ROWS),
        ("#/job/a-many/a-many%409950", "a-many@9951", 50),
    ] {
        assert_eq!(wait_rows(&browser, hash, first), rows, "{hash}");
        let bars = "return document.querySelectorAll('.chart a').length";
        let bars = browser.run(bars, &[]).unwrap().as_u64().unwrap();
        assert!(bars <= ROWS, "{bars}");
    }
    println!("six views after {:?}", begun.elapsed());
    // Suggestions of the form are bounded, too.
    let form = "location.hash = '#/what-if'";
    browser.run(form, &[]).unwrap();
    let there = "return document.querySelectorAll('datalist').length === 2";
    browser.wait("the form", there).unwrap();
    let count = "return document.querySelectorAll('datalist option').length";
    let count = browser.run(count, &[]).unwrap().as_u64().unwrap();
    assert!((1..=2_000).contains(&count), "{count}");
    drop(browser);
    runtime.block_on(server.stop());
}
