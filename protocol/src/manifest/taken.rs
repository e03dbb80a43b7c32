//! The client that a dump came from, as the node that took it in authenticated it.

use std::fmt;

/// Longest recorded client, bytes.
const MAX_TAKER_BYTES: usize = 300;

/// Client that a dump came from. Recorded as `node`, `node NAME`, `ROLE NAME`, `uid UID` or `address IP` by the node
/// that takes the dump in, from the client's certificate or from the socket that it used; the client's messages
/// cannot change it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TakenBy {
    /// Root or the daemon's user on a storage node; the node's name, empty without a certificate.
    Node(String),
    /// The holder of a certificate, an agent.
    Agent(String),
    /// Another user of a storage node, admitted to its page-server port (`--listen-uid`).
    User(u32),
    /// Any other client, as it is recorded; empty where nothing is recorded.
    Other(String),
}

impl TakenBy {
    /// Parses the text that a manifest records.
    #[must_use]
    pub fn parse(recorded: &str) -> Self {
        match recorded.split_once(' ') {
            None if recorded == "node" => Self::Node(String::new()),
            Some(("node", name)) => Self::Node(name.to_owned()),
            Some(("agent", name)) => Self::Agent(name.to_owned()),
            Some(("uid", uid)) => match uid.parse() {
                Ok(uid) => Self::User(uid),
                Err(_) => Self::Other(recorded.to_owned()),
            },
            _ => Self::Other(recorded.to_owned()),
        }
    }
}

impl fmt::Display for TakenBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(name) if name.is_empty() => f.write_str("node"),
            Self::Node(name) => write!(f, "node {name}"),
            Self::Agent(name) => write!(f, "agent {name}"),
            Self::User(uid) => write!(f, "uid {uid}"),
            Self::Other(client) if client.is_empty() => f.write_str("an unknown client"),
            Self::Other(client) => f.write_str(client),
        }
    }
}

/// Returns true if a manifest may record `client`.
pub(super) fn is_recordable(client: &str) -> bool {
    client.len() <= MAX_TAKER_BYTES && !client.chars().any(char::is_control)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_clients_round_trip() {
        for client in [
            TakenBy::Node(String::new()),
            TakenBy::Node("n1".into()),
            TakenBy::Agent("c7".into()),
            TakenBy::User(1000),
            TakenBy::Other("address 10.0.0.1".into()),
        ] {
            assert_eq!(TakenBy::parse(&client.to_string()), client);
        }
        for unknown in ["", "agent", "operator x", "Node", " node", "nodes", "uid x"] {
            assert_eq!(TakenBy::parse(unknown), TakenBy::Other(unknown.into()));
        }
    }
}
