//! Result of a dump, combined from CRIU's exit status, the action script's verdict and the daemon's reply.

use std::fs;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use permafrost_criu::Finished;
use permafrost_criu::origin::ProcessStat;
use permafrost_criu::verdict::Verdict;
use permafrost_protocol::control::{ErrorCode, SessionOpened, request};
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::interrupt::Interrupts;
use permafrost_transport::control::{Connection, ControlError};

use super::{Places, Plan, Sealed};
use crate::transfer::open_directory;

/// Longest wait for the daemon after CRIU has rolled back.
const PATIENCE: Duration = Duration::from_secs(5);

impl Plan<'_> {
    /// Combines CRIU's exit status and the action script's verdict.
    pub(super) fn conclude(
        &self,
        connection: &mut Connection,
        places: &Places,
        opened: &SessionOpened,
        finished: Finished,
        interrupts: &Interrupts,
    ) -> Result<Sealed, Failure> {
        let verdict = fs::read_to_string(&places.verdict)
            .ok()
            .and_then(|text| text.parse::<Verdict>().ok());
        if !finished.status.success() {
            // The process goes on, so a hanging daemon must not be waited for. The end of the connection ends
            // the session as well.
            let _ = connection.limit_waits(PATIENCE);
        }
        match (finished.status.success(), verdict) {
            // The daemon is not asked again: the process is gone, and the daemon may be by now.
            (
                true,
                Some(Verdict::Sealed {
                    checkpoint,
                    elapsed,
                }),
            ) => Ok(Sealed {
                finished,
                checkpoint: *checkpoint,
                seal_us: human::whole_micros(elapsed),
            }),
            // A pre-dump calls no scripts; a wrapper around CRIU may have prevented the call of the action
            // script.
            (true, _) => {
                // An interrupt must not end the session now: it may be all that is left of the process.
                interrupts.leave_alone();
                let start = Instant::now();
                let images = open_directory(&places.images)?;
                let seal = request::Seal {
                    session: opened.session.clone(),
                };
                let checkpoint = connection
                    .call_with(seal, Some(images.as_fd()), &mut |_| {})
                    .map_err(|error| self.late(interrupts.explain(error.into())))?;
                Ok(Sealed {
                    finished,
                    checkpoint,
                    seal_us: human::whole_micros(start.elapsed()),
                })
            }
            (false, Some(Verdict::Sealed { checkpoint, .. })) => {
                let name = format!("{}@{}", checkpoint.job, checkpoint.generation);
                let what = format!("{name} is sealed, but CRIU failed afterwards");
                let mut failure = Failure::criu(what, finished.digest());
                failure.hint = format!(
                    "{}; {name} can be restored or removed (permafrost rm {name})",
                    self.fate()
                );
                Err(failure)
            }
            (false, verdict)
                if (finished.limit_reached
                    || verdict.as_ref().is_some_and(Verdict::is_too_late))
                    && !interrupts.came() =>
            {
                tell_limit_reached(connection, opened);
                Err(self.rolled_back(self.limit_reached()))
            }
            (
                false,
                Some(Verdict::Refused {
                    code,
                    message,
                    hint,
                }),
            ) => {
                let code = ErrorCode::try_from(code).map_or(Code::Unreachable, Code::from);
                let failure = Failure::new(code, format!("seal: {message}")).hint(hint);
                self.abort(connection, opened);
                Err(self.rolled_back(interrupts.explain(failure)))
            }
            (false, None) => {
                let failure = if interrupts.came() {
                    Failure::interrupted("interrupted")
                } else {
                    let digest = finished.digest();
                    let blamed = digest.blames_page_server;
                    blamed
                        .then(|| session_failure(connection, places, &opened.session))
                        .flatten()
                        .unwrap_or_else(|| Failure::criu("CRIU", digest))
                };
                self.abort(connection, opened);
                Err(self.rolled_back(failure))
            }
        }
    }

    /// Returns the failure for a freeze that the guard ended. The daemon's reason is not requested: it did not
    /// reply in time.
    fn limit_reached(&self) -> Failure {
        let limit = self.freeze_limit.time();
        Failure::new(
            Code::Unreachable,
            format!(
                "permafrostd did not take the checkpoint within the freeze limit of {}",
                human::micros(human::whole_micros(limit))
            ),
        )
        .hint("see whether permafrostd hangs (permafrost status); a dump that needs longer is given more with --freeze-limit")
    }

    /// Returns the failure for a seal that failed after CRIU had ended.
    fn late(&self, failure: Failure) -> Failure {
        let mut failure = failure.during("seal");
        if !self.arguments.pre_dump && !self.leave_running {
            failure = failure.during(format!(
                "CRIU ended without the word of {}, {}",
                self.action.display(),
                self.fate()
            ));
            failure.keep_images = true;
        }
        failure
    }

    /// Discards the session now, so that the next dump of the job is not refused when this command has ended.
    /// The end of the connection would discard it too, but a moment later.
    fn abort(&self, connection: &mut Connection, opened: &SessionOpened) {
        let session = opened.session.clone();
        let _ = connection.call(request::Abort {
            session,
            freeze_limit_reached: false,
        });
    }

    fn rolled_back(&self, failure: Failure) -> Failure {
        let mut failure = failure.during(format!(
            "dump of process {} as {} failed, {}",
            self.arguments.pid,
            self.arguments.job,
            self.fate(),
        ));
        if failure.code == Code::NoSpace && failure.hint.is_empty() {
            failure.hint = "remove checkpoints: permafrost ls, permafrost rm".to_owned();
        }
        failure
    }

    /// Describes the state of the process for a message.
    fn fate(&self) -> &'static str {
        match ProcessStat::read(self.arguments.pid) {
            Ok(stat) if stat.start_ticks == self.origin.start_ticks && stat.state != 'Z' => {
                "the process goes on"
            }
            _ => "the process is gone",
        }
    }
}

/// Has the daemon count a freeze that reached its limit. The answer is not waited for, as the daemon may hang.
fn tell_limit_reached(connection: &mut Connection, opened: &SessionOpened) {
    let session = opened.session.clone();
    let request = request::Abort {
        session,
        freeze_limit_reached: true,
    };
    let _ = connection.begin(request, None);
}

/// Returns the reason for which the daemon gave the session up, if it did: CRIU only sees a closed socket or a
/// number.
fn session_failure(connection: &mut Connection, places: &Places, session: &str) -> Option<Failure> {
    let status = match connection.call(request::Status {}) {
        Ok(status) => status,
        Err(ControlError::Refused { .. }) => return None,
        Err(error) => return Some(error.into()),
    };
    let state = status
        .sessions
        .into_iter()
        .find(|state| state.session == session)?;
    if state.error.is_empty() {
        return None;
    }
    // A failed session refuses its seal with the error code of its failure.
    let images = open_directory(&places.images).ok()?;
    let seal = request::Seal {
        session: session.to_owned(),
    };
    match connection.call_with(seal, Some(images.as_fd()), &mut |_| {}) {
        Err(error @ ControlError::Refused { .. }) => Some(error.into()),
        _ => Some(Failure::new(Code::SessionFailed, state.error)),
    }
}
