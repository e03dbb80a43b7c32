//! Names of jobs, namespaces and checkpoints, as arguments have them and as text.

use permafrost_protocol::control::Checkpoint;
use permafrost_protocol::manifest::{CheckpointRef, CheckpointRefError, JobName, JobNameError};

/// Returns the name of a checkpoint, `JOB@GENERATION`.
pub fn name_of(checkpoint: &Checkpoint) -> String {
    format!("{}@{}", checkpoint.job, checkpoint.generation)
}

/// Parses a job's name; an empty name stands for none.
///
/// # Errors
/// The name breaks the rules for names of jobs.
pub fn job_name(name: &str) -> Result<String, JobNameError> {
    name.parse::<JobName>().map(String::from)
}

/// Parses a namespace: a job's name without a slash.
///
/// # Errors
/// The name has a slash, or breaks the rules for names of jobs.
pub fn namespace(name: &str) -> Result<String, String> {
    if name.contains('/') {
        return Err("a namespace has no slash".to_owned());
    }
    job_name(name).map_err(|error| error.to_string())
}

/// Parses a checkpoint's name, `JOB` or `JOB@GENERATION`.
///
/// # Errors
/// The name has another form.
pub fn checkpoint_name(name: &str) -> Result<String, CheckpointRefError> {
    name.parse::<CheckpointRef>().map(|name| name.to_string())
}
