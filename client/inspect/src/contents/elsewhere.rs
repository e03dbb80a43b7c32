//! Contents of a checkpoint over the HTTP API.

use std::time::{Duration, Instant};

use permafrost_api_types::contents::{ContentsAnswer, ContentsPages};
use permafrost_protocol::control::{
    Checkpoint, CheckpointContents, ContentsImage, MappingContents, PageCounts, ProcessContents,
    SharedContents,
};
use permafrost_protocol::manifest::CheckpointRef;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_transport::api::{ApiClient, ApiError};

/// Mappings that are asked for at a time.
const PAGE: &str = "10000";

/// Most pages of a reply: more than the contents of a checkpoint that a node describes have.
const PAGES: usize = 1_000;

/// Time within which a node that is busy is asked again: it describes few checkpoints at once.
const PATIENCE: Duration = Duration::from_secs(30);

/// Repeats a request while the node answers 503 and says when to ask again, until [`PATIENCE`] would be over by then.
/// `elapsed` returns the time since the first request.
///
/// # Errors
/// The last answer, if it is an error.
fn patiently<T>(
    mut ask: impl FnMut() -> Result<T, ApiError>,
    elapsed: impl Fn() -> Duration,
    mut wait: impl FnMut(Duration),
) -> Result<T, ApiError> {
    loop {
        let error = match ask() {
            Ok(answer) => return Ok(answer),
            Err(error) => error,
        };
        let after_s = match &error {
            ApiError::Refused(problem) if problem.status == 503 => problem.retry_after_s,
            _ => None,
        };
        let Some(after_s) = after_s else {
            return Err(error);
        };
        // A node that says 0 is not asked without a pause.
        let pause = Duration::from_secs(after_s.max(1));
        if elapsed().saturating_add(pause) > PATIENCE {
            return Err(error);
        }
        wait(pause);
    }
}

/// Asks for the contents of a checkpoint, page by page. `pid` restricts them to one process, unless it is 0.
///
/// # Errors
/// The node refuses, or another version answers.
pub(super) fn whole(
    client: &ApiClient,
    checkpoint: &str,
    pid: u32,
) -> Result<ContentsAnswer, Failure> {
    let pid = pid.to_string();
    let begun = Instant::now();
    let ask = |checkpoint: &str, after: Option<&str>| -> Result<ContentsAnswer, Failure> {
        let mut query = vec![("checkpoint", checkpoint), ("limit", PAGE)];
        if pid != "0" {
            query.push(("pid", &pid));
        }
        if let Some(after) = after {
            query.push(("after", after));
        }
        let get = || client.get("/v1/contents", &query);
        let reply = patiently(get, || begun.elapsed(), std::thread::sleep)?;
        Ok(reply.into()?)
    };
    let mut all = ask(checkpoint, None)?;
    for _ in 1..PAGES {
        let Some(after) = all.next.take() else {
            return Ok(all);
        };
        // The same one, although a newer generation may have been sealed.
        let page = ask(&all.checkpoint, Some(&after))?;
        all.next = page.next;
        for process in page.processes {
            match all.processes.last_mut() {
                Some(last) if last.pid == process.pid => last.mappings.extend(process.mappings),
                _ => all.processes.push(process),
            }
        }
    }
    match all.next {
        None => Ok(all),
        Some(_) => Err(Failure::new(
            Code::Invalid,
            format!("{checkpoint} has more mappings than are shown at a time"),
        )
        .hint("--pid PID shows those of one process")),
    }
}

/// Returns an answer as the control protocol has it. What the API does not tell, such as open files, is missing.
pub(super) fn contents(answer: &ContentsAnswer) -> CheckpointContents {
    let processes = answer.processes.iter().map(|process| ProcessContents {
        pid: process.pid,
        parent: process.parent_pid,
        program: process.program.clone(),
        executable: process.executable.clone(),
        threads: process.threads,
        pages: Some(counts(process.pages)),
        mappings: (process.mappings.iter())
            .map(|mapping| MappingContents {
                start: address(&mapping.start),
                end: address(&mapping.end),
                permissions: mapping.permissions.clone(),
                kind: mapping.kind.clone(),
                path: mapping.path.clone(),
                shared_memory: mapping.shared_memory.as_deref().map_or(0, address),
                pages: Some(counts(mapping.pages)),
                ..MappingContents::default()
            })
            .collect(),
        ..ProcessContents::default()
    });
    let shared = answer.shared_memory.iter().map(|shared| SharedContents {
        id: address(&shared.id),
        pages: Some(counts(shared.pages)),
    });
    let images = answer.images.iter().map(|image| ContentsImage {
        name: image.name.clone(),
        len_bytes: image.size_bytes,
    });
    CheckpointContents {
        checkpoint: Some(Checkpoint {
            parent_generation: answer.parent_generation.unwrap_or(0),
            ..named(&answer.checkpoint)
        }),
        compared_with: answer.compared_with.as_deref().map(named),
        processes: processes.collect(),
        shared_memory: shared.collect(),
        images: images.collect(),
        ..CheckpointContents::default()
    }
}

fn named(name: &str) -> Checkpoint {
    let reference: Option<CheckpointRef> = name.parse().ok();
    reference.map_or_else(Checkpoint::default, |reference| Checkpoint {
        generation: reference.generation.unwrap_or(0),
        job: reference.job.into(),
        ..Checkpoint::default()
    })
}

/// Returns a hexadecimal number; 0 for anything else, as a node of another version may write it.
fn address(text: &str) -> u64 {
    u64::from_str_radix(text, 16).unwrap_or(0)
}

const fn counts(pages: ContentsPages) -> PageCounts {
    PageCounts {
        pages: pages.pages,
        zero: pages.zero_pages,
        equal: pages.equal_pages,
        changed: pages.changed_pages,
        only_here: pages.new_pages,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use permafrost_api_types::problem::{Problem, ProblemKind};

    use super::*;

    /// Asks a node that refuses with `problem` as often as said; returns what comes of it, the number of requests and
    /// the seconds waited.
    fn ask(problem: &Problem, refusals: u64) -> (Result<u64, ApiError>, u64, u64) {
        ask_slow(problem, refusals, Duration::ZERO)
    }

    /// Asks as [`ask`] does a node that answers after `answers_in`.
    fn ask_slow(
        problem: &Problem,
        refusals: u64,
        answers_in: Duration,
    ) -> (Result<u64, ApiError>, u64, u64) {
        let (mut asked, clock) = (0, Cell::new(Duration::ZERO));
        let mut waited_s = 0;
        let answer = patiently(
            || {
                clock.set(clock.get() + answers_in);
                asked += 1;
                match asked {
                    n if n <= refusals => Err(ApiError::Refused(Box::new(problem.clone()))),
                    n => Ok(n),
                }
            },
            || clock.get(),
            |pause| {
                clock.set(clock.get() + pause);
                waited_s += pause.as_secs();
            },
        );
        (answer, asked, waited_s)
    }

    #[test]
    fn a_busy_node_is_asked_again_when_it_says_for_half_a_minute() {
        let mut busy = Problem::new(ProblemKind::Unavailable, "two are being described");
        assert_eq!(busy.status, 503);
        busy.retry_after_s = Some(7);
        let (answer, asked, waited_s) = ask(&busy, 3);
        assert_eq!((answer.unwrap(), asked, waited_s), (4, 4, 21));
        let (answer, asked, waited_s) = ask(&busy, u64::MAX);
        assert_eq!((asked, waited_s), (5, 28));
        assert!(matches!(answer, Err(ApiError::Refused(last)) if *last == busy));
        // A node that takes 10 s to refuse is asked for no longer.
        let (_, asked, waited_s) = ask_slow(&busy, u64::MAX, Duration::from_secs(10));
        assert_eq!((asked, waited_s), (2, 7));
        busy.retry_after_s = Some(0);
        assert_eq!(ask(&busy, 2).2, 2);
        busy.retry_after_s = Some(u64::MAX);
        assert_eq!(ask(&busy, 2).1, 1);
        // Without a time it is no matter of waiting.
        busy.retry_after_s = None;
        assert_eq!(ask(&busy, 2).1, 1);
    }

    #[test]
    fn other_refusals_are_final() {
        let mut unknown = Problem::new(ProblemKind::NotFound, "no such checkpoint");
        unknown.retry_after_s = Some(1);
        let (answer, asked, waited_s) = ask(&unknown, 1);
        assert!(answer.is_err());
        assert_eq!((asked, waited_s), (1, 0));
    }
}
