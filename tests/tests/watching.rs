//! Alert rules, the dashboard and the runbooks: by promtool, and by the commands that they name.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use common::{dump_and_adopt, pages};
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::{binaries, process, promtool};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

fn workspace() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().unwrap().to_owned()
}

fn read(path: &str) -> String {
    let path = workspace().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Runs promtool, and returns what it printed.
fn succeeds(promtool: &mut Command, arguments: &[&str]) -> String {
    let rules = workspace().join("packaging/prometheus");
    let output = promtool
        .args(arguments)
        .current_dir(rules)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
    said
}

#[test]
fn every_rule_fires_and_does_not_fire() {
    let test = "every_rule_fires_and_does_not_fire";
    // What the file tests: for each alert one case with alerts, and one without any.
    let mut cases: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    let tests = read("packaging/prometheus/alerts_test.yml");
    for case in tests.split("alertname: ").skip(1) {
        let (name, rest) = case.split_once('\n').unwrap();
        let count = cases.entry(name.to_owned()).or_default();
        let rest = rest.split("  - name: ").next().unwrap();
        match (
            rest.contains("exp_alerts: []"),
            rest.contains("exp_labels: {"),
        ) {
            (true, false) => count.1 += 1,
            (false, true) => count.0 += 1,
            _ => panic!("{name}: neither with nor without alerts: {rest}"),
        }
    }
    let rules = read("packaging/prometheus/alerts.yml");
    let alerts = rules
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "));
    let alerts: Vec<_> = alerts.collect();
    assert!(alerts.len() > 20);
    for alert in &alerts {
        assert_eq!(cases.get(*alert), Some(&(1, 1)), "{alert}");
    }
    assert_eq!(cases.len(), alerts.len());

    let Some(mut promtool) = promtool::for_test(test) else {
        return;
    };
    let said = succeeds(&mut promtool, &["test", "rules", "alerts_test.yml"]);
    assert!(said.contains("SUCCESS"), "{said}");
}

/// Returns all texts below a key of that name.
fn texts<'a>(of: &'a Value, key: &str, found: &mut Vec<&'a str>) {
    match of {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::String(text) if name == key => found.push(text),
                    value => texts(value, key, found),
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| texts(value, key, found)),
        _ => {}
    }
}

#[test]
fn queries_of_the_dashboard_are_parsed() {
    let dashboard: Value =
        serde_json::from_str(&read("packaging/grafana/permafrost.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let mut ids: Vec<_> = panels
        .iter()
        .map(|panel| panel["id"].as_u64().unwrap())
        .collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), panels.len(), "each panel has an id of its own");
    for panel in panels {
        let place = &panel["gridPos"];
        let number = |key: &str| place[key].as_u64().unwrap();
        assert!(number("x") + number("w") <= 24, "{panel}");
        let has_queries = panel["targets"]
            .as_array()
            .is_some_and(|all| !all.is_empty());
        assert_eq!(has_queries, panel["type"] != "row", "{panel}");
    }
    let mut queries = Vec::new();
    texts(&dashboard, "expr", &mut queries);
    assert!(queries.len() > 50, "{queries:?}");
    // Grafana replaces its variables before it asks; promtool reads queries as those of recording rules.
    let mut rules = "groups:\n  - name: dashboard\n    rules:\n".to_owned();
    for (number, query) in queries.iter().enumerate() {
        let query = query
            .replace("$__rate_interval", "5m")
            .replace("$instance", ".*");
        assert!(!query.contains('$'), "{query}");
        let query = query.replace('\'', "''");
        rules += &format!("      - record: dashboard:query{number}\n        expr: '{query}'\n");
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rules.yml");
    fs::write(&path, rules).unwrap();
    let Some(mut promtool) = promtool::for_test("queries_of_the_dashboard_are_parsed") else {
        return;
    };
    let said = succeeds(&mut promtool, &["check", "rules", path.to_str().unwrap()]);
    assert!(
        said.contains(&format!("{} rules found", queries.len())),
        "{said}"
    );
}

/// Returns the ids in the table of docs/logs.md, with their levels.
fn documented_events() -> BTreeMap<String, String> {
    let table = read("docs/logs.md");
    let rows = table.lines().filter_map(|line| line.strip_prefix("| `"));
    let rows = rows.filter_map(|row| row.split_once("` | "));
    let level = |rest: &str| rest.split(' ').next().unwrap().to_uppercase();
    rows.map(|(id, rest)| (id.to_owned(), level(rest)))
        .collect()
}

#[test]
fn lines_of_a_daemons_log_have_documented_events() {
    let documented = documented_events();
    assert!(documented.len() > 150, "{documented:?}");

    let work = tempfile::tempdir().unwrap();
    let config = work.path().join("permafrostd.toml");
    fs::write(&config, "log-format = 'json'\n").unwrap();
    let options = Options {
        extra: vec![format!("--config={}", config.display())],
        // RUST_LOG would go before the default; the other variable is one of the warnings.
        prefix: ["env", "-u", "RUST_LOG", "PERMAFROSTD_MISSPELT=1"]
            .map(str::to_owned)
            .to_vec(),
        ..Options::default()
    };
    let daemon = Daemon::start(work.path(), &options).unwrap();
    dump_and_adopt(&daemon, work.path(), "job", 0x40_0000, &pages(7, 100));
    let refused = daemon.try_run(&["show", "nobody"]).unwrap();
    assert!(!refused.status.success());
    fs::write(&config, "no-option = 1\n").unwrap();
    let pid = Pid::from_raw(daemon.pid().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::HUP).unwrap();
    let path = daemon.log();
    let log = || fs::read_to_string(&path).unwrap();
    process::wait_for("the refusal", Duration::from_secs(60), || {
        Ok(log().contains("configuration-refused").then_some(()))
    })
    .unwrap();
    daemon.stop().unwrap();
    let mut seen = BTreeMap::new();
    for line in log().lines() {
        let line: Value =
            serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        let event = line["event"].as_str();
        let event = event.unwrap_or_else(|| panic!("no event: {line}"));
        let level = documented.get(event);
        assert_eq!(level.map(String::as_str), line["level"].as_str(), "{line}");
        seen.insert(event.to_owned(), line);
    }
    for event in [
        "region-opened",
        "variable-unknown",
        "daemon-ready",
        "session-parked",
        "checkpoint-sealed",
        "request-refused",
        "configuration-refused",
        "daemon-stopping",
        "daemon-stopped",
    ] {
        assert!(seen.contains_key(event), "{event}: {}", log());
    }
    let sealed = &seen["checkpoint-sealed"];
    assert_eq!(sealed["id"].as_str().map(str::len), Some(32), "{sealed}");
    assert_eq!(sealed["bytes"], 100 * 4096, "{sealed}");
}

#[test]
fn runbooks_search_for_events_that_there_are() {
    let documented = documented_events();
    let mut searched = 0;
    for search in read("docs/runbooks.md").split("--grep '").skip(1) {
        let (words, _) = search.split_once('\'').unwrap();
        for word in words.split('|') {
            let is_beginning = word.ends_with('-');
            let mut ids = documented.keys();
            assert!(
                ids.any(|id| id == word || is_beginning && id.starts_with(word)),
                "no event {word}"
            );
            searched += 1;
        }
    }
    assert!(searched > 20, "{searched}");
}

/// Returns the commands of `permafrost` in a document: those in code blocks and in backquotes.
fn commands(document: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut in_block = false;
    for line in document.lines() {
        if line.starts_with("```") {
            in_block = !in_block;
        } else if in_block {
            found.push(line.to_owned());
        } else {
            found.extend(line.split('`').skip(1).step_by(2).map(str::to_owned));
        }
    }
    found.retain(|line| line.starts_with("permafrost "));
    found
}

#[test]
fn runbooks_name_commands_and_options_that_there_are() {
    let program = binaries::dir().unwrap().join("permafrost");
    let commands = commands(&read("docs/runbooks.md"));
    assert!(commands.len() > 50, "{commands:?}");
    let mut helps: BTreeMap<Vec<String>, String> = BTreeMap::new();
    for command in commands {
        let words: Vec<_> = command.split_whitespace().skip(1).collect();
        let is_name = |word: &&str| word.chars().all(|c| c.is_ascii_lowercase() || c == '-');
        let names = words
            .iter()
            .take_while(|word| is_name(word) && !word.starts_with('-'));
        let names: Vec<_> = names.map(|name| (*name).to_owned()).collect();
        assert!(!names.is_empty(), "{command}");
        let help = helps.entry(names.clone()).or_insert_with(|| {
            let output = Command::new(&program)
                .args(&names)
                .arg("--help")
                .output()
                .unwrap();
            assert!(output.status.success(), "{command}");
            String::from_utf8(output.stdout).unwrap()
        });
        for option in words.iter().filter(|word| word.starts_with("--")) {
            assert!(help.contains(option), "{command}: no {option} in\n{help}");
        }
        // A command that has commands of its own is nothing without one.
        assert!(
            !help.contains("\nCommands:"),
            "{command}: of which command?"
        );
    }
}
