//! Requests to a node's HTTP API: its address, the credentials, and the exit codes of its refusals.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use permafrost_transport::api::{ApiClient, ApiOptions, ApiReply, TOKEN_VARIABLE, URL_VARIABLE};
use serde_json::Value;

use crate::context::Context;
use crate::failure::{Code, Failure};

/// Largest file of tasks, bytes: slightly more than the API accepts.
const MOST_BYTES: u64 = 16 << 20;

/// Address of the API, and the credentials to use.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "API")]
pub struct ApiArguments {
    /// URL of a node's API: https://HOST:PORT, or http:// on the loopback interface [default: the socket beside
    /// --socket].
    #[arg(long, value_name = "URL", env = URL_VARIABLE)]
    pub api: Option<String>,
    /// File with a token, as `permafrost token new` prints it; never sent over a network without TLS [default: the
    /// variable PERMAFROST_API_TOKEN].
    #[arg(long, value_name = "FILE", requires = "api")]
    pub api_token_file: Option<PathBuf>,
    /// File with the CA that the node's certificate is of.
    #[arg(long, value_name = "FILE", requires = "api")]
    pub api_ca: Option<PathBuf>,
    /// Directory of ca.pem, cert.pem and key.pem: shows the certificate to the node, instead of a token, and checks
    /// the node's by its CA.
    #[arg(long, value_name = "DIR", requires = "api", conflicts_with = "api_ca")]
    pub identity: Option<PathBuf>,
    /// Name of the node, if its certificate has not the host of the URL (`pki issue --host`).
    #[arg(long, value_name = "NODE", requires = "api")]
    pub api_node: Option<String>,
}

impl ApiArguments {
    /// Returns a client of the API at the address.
    ///
    /// # Errors
    /// The token cannot be read; the URL or the credentials are not valid.
    pub fn client(&self, context: &Context) -> Result<ApiClient, Failure> {
        let token = match &self.api_token_file {
            Some(path) => {
                let text = std::fs::read_to_string(path)
                    .map_err(|error| Failure::io("read", path, &error))?;
                Some(text.trim().to_owned())
            }
            // The socket requires no token.
            None if self.api.is_none() => None,
            None => std::env::var(TOKEN_VARIABLE).ok(),
        };
        Ok(ApiClient::new(&ApiOptions {
            url: self.api.clone(),
            token: token.filter(|token| !token.is_empty()),
            ca: self.api_ca.clone(),
            identity: self.identity.clone(),
            node: self.api_node.clone(),
            ..ApiOptions::beside(&context.socket)
        })?)
    }
}

/// Returns the name of the node that answers: dumps from this machine go to it.
pub fn own_node(client: &ApiClient) -> Result<String, Failure> {
    let answer = client.get("/v1/nodes", &[("limit", "1")])?;
    let nodes: permafrost_api_types::nodes::NodesAnswer = answer.into()?;
    Ok(nodes.answered_by)
}

/// Prints an answer: unchanged with --json, otherwise as `human` formats it.
pub fn print(
    context: &Context,
    answer: &ApiReply,
    human: impl FnOnce() -> String,
) -> Result<(), Failure> {
    if context.json {
        context.write(answer.bytes())
    } else {
        context.write_text(&human())
    }
}

/// Reads a request body from a file, or from standard input for `-`: a JSON array becomes the value of `field`,
/// and an object is the request itself.
pub fn request_of(path: &Path, field: &str) -> Result<Value, Failure> {
    let read = |error| Failure::io("read", path, &error);
    let mut text = String::new();
    if path == Path::new("-") {
        let stdin = io::stdin().lock();
        stdin.take(MOST_BYTES).read_to_string(&mut text)
    } else {
        let file = std::fs::File::open(path).map_err(read)?;
        file.take(MOST_BYTES).read_to_string(&mut text)
    }
    .map_err(read)?;
    of_text(&text, field).map_err(|what| {
        Failure::new(Code::Invalid, format!("{}: {what}", path.display())).hint(format!(
            "a JSON array of tasks, or a request of the API with {field:?}: docs/api.md"
        ))
    })
}

fn of_text(text: &str, field: &str) -> Result<Value, String> {
    match serde_json::from_str(text) {
        Ok(Value::Array(tasks)) => Ok(serde_json::json!({ field: tasks })),
        Ok(request @ Value::Object(_)) => Ok(request),
        Ok(_) => Err("neither an array nor an object".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Sets a field of the request to a value from the command line, if one was given.
pub fn set<T: serde::Serialize>(request: &mut Value, field: &str, value: Option<T>) {
    if let (Some(value), Value::Object(request)) = (value, request)
        && let Ok(value) = serde_json::to_value(value)
    {
        request.insert(field.to_owned(), value);
    }
}

/// Returns a duration in seconds, as the API expects it.
pub fn seconds(time: Duration) -> f64 {
    time.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_holds_tasks_or_a_whole_request() {
        let tasks = of_text(r#"[{"id":"a"}]"#, "tasks").unwrap();
        assert_eq!(tasks, serde_json::json!({"tasks": [{"id": "a"}]}));
        let whole = r#"{"tasks":[],"copies":"replicated"}"#;
        let mut request = of_text(whole, "tasks").unwrap();
        set(&mut request, "detail", Some("totals"));
        set(&mut request, "nodes", None::<Vec<String>>);
        assert_eq!(
            request,
            serde_json::json!({"tasks": [], "copies": "replicated", "detail": "totals"})
        );
        for bad in ["", "7", "[", "\"a\"", "null"] {
            assert!(of_text(bad, "tasks").is_err(), "{bad}");
        }
    }
}
