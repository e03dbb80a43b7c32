//! Asks the daemon and the API for what a frame shows.

use permafrost_api_types::nodes::NodesAnswer;
use permafrost_protocol::control::{ServerStatus, request};
use permafrost_terminal::api::ApiArguments;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_transport::api::ApiClient;

use super::TopView;

/// Most pages of the list of nodes, of 1,000 each.
const PAGES: usize = 10;

pub(super) struct Looker<'a> {
    context: &'a Context,
    client: ApiClient,
    /// True if a node is asked over HTTP only.
    elsewhere: bool,
}

impl<'a> Looker<'a> {
    pub(super) fn new(context: &'a Context, api: &ApiArguments) -> Result<Self, Failure> {
        Ok(Self {
            context,
            client: api.client(context)?,
            elsewhere: api.api.is_some(),
        })
    }

    /// Asks for a frame. Without `--api` the daemon has to answer; a missing API socket is said in the frame.
    pub(super) fn look(&self) -> Result<TopView, Failure> {
        let mut view = TopView {
            at_unix_ms: human::now_unix_ms(),
            ..TopView::default()
        };
        if !self.elsewhere {
            let status: ServerStatus = self.context.connect()?.call(request::Status {})?;
            view.add_status(&status);
        }
        match self.nodes(&mut view) {
            // An agent has no API of its own.
            Err(failure) if !self.elsewhere && failure.code == Code::Unreachable => {
                view.problem = Some(failure.message);
            }
            looked => looked?,
        }
        Ok(view)
    }

    fn nodes(&self, view: &mut TopView) -> Result<(), Failure> {
        let mut after = String::new();
        for _ in 0..PAGES {
            let query = [("after", after.as_str())];
            let query = if after.is_empty() {
                &[][..]
            } else {
                &query[..]
            };
            let answer: NodesAnswer = self.client.get("/v1/nodes", query)?.into()?;
            view.add_nodes(&answer);
            match answer.next {
                Some(next) => after = next,
                None => break,
            }
        }
        Ok(())
    }
}
