//! The page at `/ui`, in a real Chromium, over a real daemon with real dumps.

mod common;

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::clustered::{LONG, PAUSE, Task, dump, holders, line};
use permafrost_tests::browser::{self, Browser};
use permafrost_tests::cluster::{Cluster, Setup, name};
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::workload::{self, Workload};
use permafrost_tests::{binaries, criu, process};
use serde_json::{Value, json};

/// Makes a token and the file of tokens with its line alone.
fn token(work: &Path, name: &str) -> String {
    let made = std::process::Command::new(binaries::path("permafrost").unwrap())
        .args(["--json", "token", "new", "--name", name, "--scopes", "read"])
        .output()
        .unwrap();
    let made: Value = serde_json::from_slice(&made.stdout).unwrap();
    let fresh = work.join("tokens.new");
    std::fs::write(&fresh, format!("{}\n", made["line"].as_str().unwrap())).unwrap();
    std::fs::set_permissions(&fresh, std::fs::Permissions::from_mode(0o600)).unwrap();
    std::fs::rename(fresh, work.join("tokens")).unwrap();
    made["token"].as_str().unwrap().to_owned()
}

fn options(work: &Path, listen: &str) -> Options {
    let mut options = Options::default();
    options
        .extra
        .push("--listen-metrics=127.0.0.1:0".to_owned());
    options.extra.push(format!("--listen-api={listen}"));
    let tokens = work.join("tokens");
    options
        .extra
        .push(format!("--api-tokens={}", tokens.display()));
    options
}

fn show(browser: &Browser, token: &str) {
    let script = "document.getElementById('token').value = arguments[0]; document.querySelector('main form button').click()";
    browser.run(script, &[json!(token)]).unwrap();
}

fn go(browser: &Browser, hash: &str, heading: &str) {
    browser
        .run("location.hash = arguments[0]", &[json!(hash)])
        .unwrap();
    let shown = format!(
        "return document.querySelector('main h1')?.textContent === {heading:?} && !document.getElementById('view').ariaBusy"
    );
    browser.wait(heading, &shown).unwrap();
}

fn text(browser: &Browser) -> String {
    let text = browser.run("return document.querySelector('main').innerText", &[]);
    text.unwrap().as_str().unwrap().to_owned()
}

/// Returns how many requests for files of the page there were.
fn page_requests(daemon: &Daemon) -> u64 {
    daemon.counter("permafrost_page_requests_total").unwrap()
}

/// Compares the shown address spaces with those of `permafrost show --maps`.
fn address_spaces(browser: &Browser, daemon: &Daemon, work: &Path, address: &str, token: &str) {
    let told = daemon.json(&["show", "team/train@2", "--maps"]).unwrap();
    let processes = told["processes"].as_array().unwrap();
    let mappings = processes
        .iter()
        .flat_map(|one| one["mappings"].as_array().unwrap());
    let mappings: Vec<&Value> = mappings.collect();
    let open = "for (const d of document.querySelectorAll('main details')) d.open = true";
    browser.run(open, &[]).unwrap();
    let rows = "return document.querySelectorAll('.process tbody tr').length";
    let images = "document.querySelector('main').innerText.includes('core-')";
    let all = format!("{rows} === {} && {images}", mappings.len());
    browser.wait("all mappings and images", &all).unwrap();
    let largest = mappings
        .iter()
        .max_by_key(|mapping| mapping["pages"]["pages"].as_u64());
    let largest = format!("{:012x}-", largest.unwrap()["start"].as_u64().unwrap());
    let shown = text(browser);
    assert!(shown.contains(&largest), "{largest}: {shown}");
    assert!(shown.contains("small images"), "{shown}");
    // The mapping under the pointer is named: at some place of the strip the largest.
    let point = "const largest = [...document.querySelectorAll('.process')].find((one) => one.textContent.includes(arguments[0])); const s = largest.querySelector('.space'); const b = s.getBoundingClientRect(); const seen = []; for (let x = 0; x < 200; x++) { s.dispatchEvent(new PointerEvent('pointermove', { clientX: b.left + (b.width * (x + 0.5)) / 200 })); seen.push(largest.querySelector('.under').textContent) } return seen.some((line) => line.startsWith(arguments[0])) && new Set(seen).size > 1";
    assert_eq!(browser.run(point, &[json!(largest)]).unwrap(), true);

    let file = work.join("token");
    std::fs::write(&file, token).unwrap();
    let url = format!("http://{address}");
    let file = file.to_str().unwrap();
    let elsewhere = [
        "show",
        "team/train@2",
        "--maps",
        "--api",
        &url,
        "--api-token-file",
        file,
    ];
    let text = |arguments: &[&str]| daemon.run(arguments).unwrap();
    assert_eq!(text(&elsewhere), text(&["show", "team/train@2", "--maps"]));
    let audited = std::fs::read_to_string(work.join("data/audit.log")).unwrap();
    let read = audited
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .find(|line| line["via"] == "api" && line["action"] == "read-contents");
    let read = read.unwrap_or_else(|| panic!("{audited}"));
    assert_eq!(
        (&read["on"], &read["outcome"]),
        (&json!("team/train@2"), &json!("done"))
    );
}

#[test]
fn each_view_shows_what_is_there_and_a_dump_appears_by_itself() {
    let test = "each_view_shows_what_is_there_and_a_dump_appears_by_itself";
    let Some(_) = criu::for_test(test).filter(|_| browser::for_test(test)) else {
        return;
    };
    let work = tempfile::tempdir().unwrap();
    let good = token(work.path(), "looks");
    let daemon = Daemon::start(work.path(), &options(work.path(), "127.0.0.1:0")).unwrap();
    let (address, browser) = (daemon.api().to_owned(), Browser::start().unwrap());
    let page = format!("http://{address}/ui");

    let files = page_requests(&daemon);
    // Nobody sees anything without a token, nor with a wrong one.
    browser.open(&page).unwrap();
    let asks = "return document.getElementById('token') !== null";
    browser.wait("the question for a token", asks).unwrap();
    show(&browser, "pft-wrong");
    let says = "return document.querySelector('[role=alert]')?.textContent.includes('does not take this token')";
    browser.wait("that the token is wrong", says).unwrap();
    // Strangers read files alone, and they are counted.
    assert!(page_requests(&daemon) > files + 5, "{files}");
    let started = Instant::now();
    show(&browser, &good);
    let nodes = "return document.querySelector('main h1')?.textContent === 'Nodes' && document.querySelectorAll('tbody tr').length === 1";
    browser.wait("the nodes", nodes).unwrap();
    println!("nodes after {:?}", started.elapsed());
    assert!(text(&browser).contains("alive"), "{}", text(&browser));
    let live = "return document.getElementById('stream').textContent === 'live'";
    browser.wait("the stream of events", live).unwrap();

    // Jobs: none, and then one that appears while the view is open.
    go(&browser, "#/jobs", "Jobs");
    assert!(text(&browser).contains("There is no checkpoint"));
    let place = work.path().join("workload");
    std::fs::create_dir(&place).unwrap();
    let mut memory = Workload::start(
        &place,
        &workload::Options {
            size_mib: 16,
            ..workload::Options::default()
        },
    )
    .unwrap();
    let pid = memory.pid().to_string();
    let dump = |kept: &[&str]| {
        let arguments = [&["dump", "--pid", &pid, "--job", "team/train"], kept].concat();
        daemon.run(&arguments).unwrap();
    };
    dump(&["--leave-running"]);
    let appears = "return [...document.querySelectorAll('tbody th a')].some((a) => a.textContent === 'team/train')";
    browser.wait("the job", appears).unwrap();
    go(&browser, "#/job/team%2Ftrain", "team/train");
    memory.modify().unwrap();
    dump(&["--leave-running"]);
    let two = "return document.querySelectorAll('tbody tr').length === 2 && document.querySelectorAll('.chart rect').length === 4";
    browser.wait("the second generation", two).unwrap();

    // A checkpoint: what it added and shares, as the command line lists it.
    go(&browser, "#/checkpoint/team%2Ftrain/2", "team/train@2");
    let shown = text(&browser);
    assert!(shown.contains("shared with earlier ones"), "{shown}");
    assert!(shown.contains("team/train@1"), "{shown}");
    let strip = "const w = [...document.querySelectorAll('.strip rect')].map((r) => Number(r.getAttribute('width'))); return w[0] > 0 && w[1] > w[0] && Math.abs(w[0] + w[1] + w[2] - 1000) < 1";
    browser.wait("the strip", strip).unwrap();

    // Its address spaces, as the command line tells them: here, and over the API.
    let read = "return document.querySelectorAll('.process .space rect.stored').length > 3";
    browser.wait("the address spaces", read).unwrap();
    address_spaces(&browser, &daemon, work.path(), &address, &good);

    // What if: the ways of preempting the job, with costs from what was measured.
    go(&browser, "#/what-if", "What if");
    let ask = "const put = (name, value) => { document.querySelector(`[name=${name}]`).value = value }; put('job', 'team/train'); put('memory', '0.02'); put('progress', '30'); document.getElementById('want-memory').value = '0.01'; document.querySelector('main form').requestSubmit()";
    browser.run(ask, &[]).unwrap();
    let costs = "return document.querySelectorAll('main table').length === 2 && document.querySelector('main').innerText.includes('least loss')";
    browser.wait("the costs", costs).unwrap();
    let shown = text(&browser);
    assert!(shown.contains("These free what is wanted"), "{shown}");
    assert!(
        shown.contains("incremental dump") && shown.contains("kill"),
        "{shown}"
    );
    // What the API refuses is named, and the form stays.
    let bad = "document.querySelector('[name=node]').value = 'nowhere'; document.querySelector('main form').requestSubmit()";
    browser.run(bad, &[]).unwrap();
    let named = "return document.querySelector('main [aria-label=Result]').innerText.includes('nowhere') && document.querySelector('main form') !== null";
    browser.wait("the refusal", named).unwrap();

    // The keyboard alone leads from the beginning of the page to a view.
    go(&browser, "#/nodes", "Nodes");
    browser
        .run("document.querySelector('nav a').focus()", &[])
        .unwrap();
    browser.press('\u{e004}').unwrap();
    browser.press('\u{e007}').unwrap();
    let jobs = "return document.querySelector('main h1')?.textContent === 'Jobs' && document.activeElement === document.getElementById('view')";
    browser.wait("the jobs by keyboard", jobs).unwrap();

    // Text is text, whatever it is made of.
    let hostile = "return import('/ui/dom.js').then(({ el }) => { document.querySelector('main').append(el('p', { id: 'hostile' }, '<img src=x onerror=\"window.hit = 1\">')); return document.querySelector('#hostile img') === null && document.getElementById('hostile').textContent.startsWith('<img') })";
    assert_eq!(browser.run(hostile, &[]).unwrap(), true);
    let refused = "try { document.querySelector('main').innerHTML = '<b>x</b>'; return false } catch { return true }";
    assert_eq!(browser.run(refused, &[]).unwrap(), true, "trusted types");
    assert_ne!(browser.run("return window.hit", &[]).unwrap(), 1);

    // A token that is taken away ends what it showed, also of pages that are open.
    go(&browser, "#/nodes", "Nodes");
    token(work.path(), "another");
    browser.wait("the question for a token", asks).unwrap();
    // The view behind the question asks no more: what is being typed stays.
    browser
        .run("document.getElementById('token').value = 'half'", &[])
        .unwrap();
    std::thread::sleep(Duration::from_secs(6));
    let half = "return document.getElementById('token').value";
    assert_eq!(browser.run(half, &[]).unwrap(), "half");
    let good = token(work.path(), "looks-again");
    std::thread::sleep(Duration::from_millis(1_200));
    show(&browser, &good);
    browser.wait("the view", nodes).unwrap();

    // The node stops and comes back: the page says so, and goes on.
    daemon.stop().unwrap();
    let gone = "return document.getElementById('stream').textContent.startsWith('not live')";
    browser.wait("that the node is gone", gone).unwrap();
    let daemon = Daemon::start(work.path(), &options(work.path(), &address)).unwrap();
    browser.wait("the stream of events", live).unwrap();
    memory.kill();
    drop(daemon);

    no_faults(&browser);
}

/// Checks that no script failed, and that the policy forbade nothing but what this test tried.
fn no_faults(browser: &Browser) {
    // Refused requests and a node that was stopped are logged by the browser; faults of scripts are `TypeError` and the
    // like, and what the policy forbids names it.
    let ours = |line: &String| line.contains("Error:") || line.contains("Content Security Policy");
    let mut faults = browser.console().unwrap();
    faults.retain(|line| ours(line) && !line.contains("TrustedHTML"));
    assert!(faults.is_empty(), "{faults:#?}");
}

/// Name of the longest job, with all kinds of characters that the names of jobs have.
fn long_job() -> String {
    let name = format!("team/a:b+c.d_e-f/{}", "x".repeat(200));
    name.chars().take(200).collect()
}

/// A process whose name is markup. It ends when it is dropped.
struct Hostile(Child);

impl Hostile {
    const NAME: &str = "<b onload=x>";

    fn start() -> Self {
        let script = "$0 = '<b onload=x>'; sleep 1 while 1";
        let child = Command::new("setsid")
            .args(["perl", "-e", script])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let hostile = Self(child.unwrap());
        let comm = format!("/proc/{}/comm", hostile.0.id());
        process::wait_for("the name", LONG, || {
            let name = std::fs::read_to_string(&comm)?;
            Ok((name.trim_end() == Self::NAME).then_some(()))
        })
        .unwrap();
        hostile
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        process::kill(&[self.0.id()]);
        let _ = self.0.wait();
    }
}

#[test]
fn a_cluster_is_shown_as_it_changes() {
    const TEST: &str = "a_cluster_is_shown_as_it_changes";
    if criu::for_test(TEST).is_none() || !browser::for_test(TEST) {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let good = token(work.path(), "looks");
    let tokens = work.path().join("tokens");
    let setup = Setup {
        members: 1,
        extra: [
            "--repair-grace=2s",
            "--lease=2s",
            "--scrub-period=off",
            "--listen-api=0.0.0.0:7119",
            &format!("--api-tokens={}", tokens.display()),
        ]
        .map(str::to_owned)
        .to_vec(),
        ..Setup::default()
    };
    let Some(cluster) = Cluster::for_test(TEST, setup).unwrap() else {
        return;
    };
    let leader = process::wait_for("a leader", LONG, || {
        std::thread::sleep(PAUSE);
        let list = cluster.node(0).json(&["node", "ls"])?;
        Ok((0..3).find(|node| list["leader"] == name(*node).as_str()))
    });
    let leader = leader.unwrap();
    // The browser is on the leader's host.
    let host = cluster.host(leader);
    let watched = host.run(|| {
        watch(&cluster, leader, work.path(), &good);
        Ok(())
    });
    watched.unwrap();
}

fn watch(cluster: &Cluster, leader: usize, work: &Path, good: &str) {
    let node = cluster.node(leader);
    let page = format!("https://{}:7119/ui", cluster.host(leader).address());
    let browser = Browser::start().unwrap();
    browser.open(&page).unwrap();
    let asks = "return document.getElementById('token') !== null";
    browser.wait("the question for a token", asks).unwrap();
    show(&browser, good);
    let alive = |count: usize| {
        format!(
            "return [...document.querySelectorAll('tbody .good')].filter((one) => one.textContent === 'alive').length === {count}"
        )
    };
    browser.wait("three nodes", &alive(3)).unwrap();
    browser.run("window.mark = 'not reloaded'", &[]).unwrap();

    // A real dump appears with both copies, in the list and in its job.
    go(&browser, "#/jobs", "Jobs");
    let job = match std::env::var_os(browser::PICTURES) {
        Some(_) => "team/train".to_owned(),
        None => long_job(),
    };
    let mut task = Task::start(cluster, leader, 16);
    let pid = task.pid();
    node.run(&["dump", "--pid", &pid, "--job", &job, "--leave-running"])
        .unwrap();
    let appears = "return [...document.querySelectorAll('tbody tr')].some((row) => row.querySelector('a')?.textContent === arguments[0] && row.textContent.includes('2 of 2'))";
    let listed = appears.replace("arguments[0]", &json!(job).to_string());
    browser.wait("the job with two copies", &listed).unwrap();
    let hash = format!("#/job/{}", job.replace('/', "%2F"));
    go(&browser, &hash, &job);
    task.modify().unwrap();
    dump(node, &mut task, &job);
    let two = "return document.querySelectorAll('tbody tr').length === 2";
    browser.wait("the second generation", two).unwrap();
    go(
        &browser,
        &format!("#/checkpoint/{}/2", job.replace('/', "%2F")),
        &format!("{job}@2"),
    );
    let read = "return document.querySelectorAll('.process .space rect').length > 3";
    browser.wait("the address spaces", read).unwrap();
    browser
        .picture("page-checkpoint.png", true, [1100, 900])
        .unwrap();

    // Text of a program and of a job is text.
    let hostile = Hostile::start();
    let of_markup = [
        "dump",
        "--pid",
        &hostile.0.id().to_string(),
        "--job",
        "__proto__",
    ];
    node.run(&[&of_markup[..], &["--leave-running"]].concat())
        .unwrap();
    go(&browser, "#/checkpoint/__proto__/1", "__proto__@1");
    let named = "return [...document.querySelectorAll('h3')].some((one) => one.textContent.includes('<b onload=x>')) && document.querySelector('main b') === null";
    browser.wait("the name of the program", named).unwrap();

    // What was predicted and measured of the dumps.
    go(&browser, "#/activity", "Activity");
    let ended = "return [...document.querySelectorAll('tbody th')].some((one) => one.textContent === '__proto__@1')";
    browser.wait("the dumps that ended", ended).unwrap();
    // A node that is too busy to renew its lease in time is missed for a moment.
    let healthy = "return document.body.innerText.includes('Every checkpoint has its copies')";
    browser.wait("the standing of the copies", healthy).unwrap();

    // A node dies: that is seen, and so are the repair and its result, without a reload.
    let held = holders(&line(node, &job).unwrap());
    let number = |wanted: &dyn Fn(usize) -> bool| (0..3).find(|node| wanted(*node)).unwrap();
    let lost = number(&|node| node != leader && held.contains(&name(node)));
    let spare = number(&|node| !held.contains(&name(node)));
    go(&browser, "#/nodes", "Nodes");
    process::kill(&[cluster.node(lost).pid()]);
    let dead = "return [...document.querySelectorAll('tbody tr')].some((row) => row.querySelector('th').textContent === arguments[0] && row.querySelector('.bad')?.textContent === 'not alive')";
    let dead = dead.replace("arguments[0]", &json!(name(lost)).to_string());
    browser.wait("that the node is not alive", &dead).unwrap();
    browser.wait("two nodes", &alive(2)).unwrap();
    go(&browser, "#/activity", "Activity");
    let repaired =
        "return /[1-9][0-9]* copies of .* made/.test(document.querySelector('main').innerText)";
    browser.wait("the repair", repaired).unwrap();
    browser
        .picture("page-activity.png", false, [1100, 760])
        .unwrap();
    go(&browser, &hash, &job);
    let whole = "return [...document.querySelectorAll('tbody tr')].every((row) => row.textContent.includes('2 of 2') && row.textContent.includes(arguments[0]))";
    let whole = whole.replace("arguments[0]", &json!(name(spare)).to_string());
    browser
        .wait("the copies on the node that had none", &whole)
        .unwrap();
    let mark = browser.run("return window.mark", &[]).unwrap();
    assert_eq!(mark, "not reloaded");

    // A token that is no longer good ends what is shown.
    go(&browser, "#/activity", "Activity");
    token(work, "another");
    browser.wait("the question for a token", asks).unwrap();
    let empty = "return !document.querySelector('main').innerText.includes('Repair')";
    browser.wait("nothing of what was shown", empty).unwrap();
    no_faults(&browser);
}
