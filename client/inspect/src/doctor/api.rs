//! What a node answers over HTTP, and the credentials for it.

use std::time::{Duration, Instant};

use permafrost_api_types::nodes::{ListedNode, NodeState, NodesAnswer};
use permafrost_terminal::api::ApiArguments;
use permafrost_terminal::context::Context;
use permafrost_terminal::human;
use permafrost_transport::api::ApiReply;

use super::report::Findings;
use super::{certificates, cluster, files};

const AREA: &str = "api";

/// Time for an answer, from which on a scheduler that asks often has to wait.
const SLOW: Duration = Duration::from_millis(250);

/// Age of a node's report, seconds, from which on its figures are old.
const OLD_S: f64 = 60.0;

pub(super) fn check(findings: &mut Findings, context: &Context, arguments: &ApiArguments) {
    if let Some(path) = &arguments.api_token_file {
        files::secret(findings, "token", path);
    }
    if let Some(directory) = &arguments.identity {
        certificates::check(findings, directory);
    }
    let url = arguments.api.clone().unwrap_or_default();
    let place = (AREA, "nodes");
    let client = match arguments.client(context) {
        Ok(client) => client,
        Err(failure) => return findings.error(place, failure.message, failure.hint),
    };
    let asked = Instant::now();
    let answer = client
        .get("/v1/nodes", &[])
        .map_err(permafrost_terminal::failure::Failure::from);
    let took = asked.elapsed();
    let (reply, nodes) = match answer.and_then(|reply| {
        let nodes: NodesAnswer = reply.read()?;
        Ok((reply.clone(), nodes))
    }) {
        Ok(answered) => answered,
        Err(failure) => {
            let advice = if failure.hint.is_empty() {
                "see that permafrostd serves it (--listen-api), and that nothing else has the port"
                    .to_owned()
            } else {
                failure.hint
            };
            return findings.error(place, failure.message, advice);
        }
    };
    let found = format!(
        "{url} answers in {}, node {}",
        human::duration(took),
        nodes.answered_by
    );
    if took > SLOW {
        findings.warning(place, found, "ask a node that is nearer, or less busy");
    } else {
        findings.ok(place, found);
    }
    clock(findings, &reply, took, &nodes.answered_by);
    for node in &nodes.nodes {
        check_node(findings, node);
    }
    if nodes.next.is_some() {
        findings.skipped((AREA, "more nodes"), "only the first 1,000 were looked at");
    }
    findings.skipped(
        (AREA, "the rest"),
        "kernel, CRIU, regions, the clocks of other nodes and etcd are looked at by `permafrost doctor` on the node",
    );
}

/// Compares the clocks by the Date of the answer, which has whole seconds.
fn clock(findings: &mut Findings, reply: &ApiReply, took: Duration, node: &str) {
    let place = (AREA, "clock");
    let Some(there_ms) = reply.date().and_then(unix_ms_of) else {
        return findings.skipped(place, "the answer has no date");
    };
    let took_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
    let middle_ms = human::now_unix_ms().saturating_sub(took_ms / 2);
    // The date was cut to a second: on average half a second is missing.
    let ahead_ms = i64::try_from(there_ms.saturating_add(500)).unwrap_or(i64::MAX)
        - i64::try_from(middle_ms).unwrap_or(i64::MAX);
    let exact_ms = 500 + took_ms / 2;
    let name = format!("this machine, as {node} has it");
    cluster::check_clock(findings, place, ahead_ms, exact_ms, &name);
}

fn check_node(findings: &mut Findings, node: &ListedNode) {
    let name = format!("node {}", node.name);
    let place = (AREA, name.as_str());
    if !node.live {
        return match node.state {
            NodeState::Removed => findings.ok(place, "removed"),
            _ => findings.warning(
                place,
                "down",
                "start it, or drain and remove it: `permafrost node`",
            ),
        };
    }
    let doubts = node.doubts.join("; ");
    if !doubts.is_empty() {
        findings.warning(
            place,
            format!("up, and parts of its report are not believed: {doubts}"),
            "see its log; `permafrost bench node` there measures it anew",
        );
    } else if node.age_s.is_none_or(|age| age > OLD_S) {
        findings.warning(
            place,
            "up, and its last report is old",
            "see that it reaches etcd: `permafrost doctor` on the node",
        );
    } else {
        findings.ok(place, format!("up, {}", node.version));
    }
    if let Some(tier) = node.tiers.first()
        && tier.free_bytes < tier.capacity_bytes / 10
    {
        findings.warning(
            (AREA, &format!("room of {}", node.name)),
            format!(
                "{} of {} free",
                human::bytes(tier.free_bytes),
                human::bytes(tier.capacity_bytes)
            ),
            "remove checkpoints, or enlarge its region: `permafrost region` on the node",
        );
    }
}

/// Parses a date of HTTP, such as `Sun, 06 Nov 1994 08:49:37 GMT` (RFC 9110, section 5.6.7); milliseconds since the
/// Unix epoch.
fn unix_ms_of(date: &str) -> Option<u64> {
    const MONTHS: &str = "JanFebMarAprMayJunJulAugSepOctNovDec";
    let mut parts = date.split_once(", ")?.1.split(' ');
    let day: i64 = parts.next()?.parse().ok()?;
    let month = MONTHS.find(parts.next().filter(|month| month.len() == 3)?)? / 3 + 1;
    let month = i64::try_from(month).ok()?;
    let year: i64 = parts.next()?.parse().ok()?;
    let mut time = parts
        .next()?
        .split(':')
        .map(|part| part.parse::<i64>().ok());
    let mut next = || time.next().flatten();
    let second = (next()? * 60 + next()?) * 60 + next()?;
    // Civil date to days: H. Hinnant, "chrono-Compatible Low-Level Date Algorithms"; years start in March.
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let days = era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100
        + day_of_year
        - 719_468;
    u64::try_from((days * 86_400 + second) * 1_000).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_of_http_are_parsed() {
        for (text, unix_s) in [
            ("Sun, 06 Nov 1994 08:49:37 GMT", 784_111_777),
            ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
            ("Tue, 29 Feb 2000 00:00:00 GMT", 951_782_400),
        ] {
            assert_eq!(unix_ms_of(text), Some(unix_s * 1_000), "{text}");
            // The other direction is another piece of code.
            assert!(
                human::date(unix_s * 1_000).contains(&text[17..25]),
                "{text}"
            );
        }
        for bad in [
            "",
            "Sun",
            "Sun, x",
            "Sun, 06 Foo 1994 08:49:37 GMT",
            "Sun, 06 Nov 1994 08:49 GMT",
        ] {
            assert_eq!(unix_ms_of(bad), None, "{bad}");
        }
    }
}
