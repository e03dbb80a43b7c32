//! `permafrost pki deny`, `undeny` and `denied`: certificates that are refused before they expire.

use std::path::PathBuf;

use clap::Args;
use permafrost_identity::{DENIED, Denial, DenyList, Role, Subject};
use permafrost_protocol::control::{Denials, request};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("who").required(true).multiple(true))]
pub(crate) struct DenyArguments {
    /// Serial number of a certificate, as `pki show` prints it. Repeatable.
    #[arg(long = "serial", value_name = "HEX", group = "who")]
    serials: Vec<String>,
    /// Every certificate of a holder, such as agent/c7, those issued later included. Repeatable.
    #[arg(long = "holder", value_name = "ROLE/NAME", group = "who")]
    holders: Vec<String>,
    /// The certificate in this directory. Repeatable.
    #[arg(long = "certificate", value_name = "DIR", group = "who")]
    certificates: Vec<PathBuf>,
    #[command(flatten)]
    list: ListArguments,
}

#[derive(Debug, Args)]
pub(crate) struct ListArguments {
    /// Use the list beside the certificate in this directory, instead of asking the daemon: for an agent, or a node
    /// that does not run.
    #[arg(long, value_name = "DIR")]
    identity: Option<PathBuf>,
}

pub(crate) fn deny(context: &Context, arguments: &DenyArguments) -> Result<(), Failure> {
    let denials = arguments.denials()?;
    let list = change(context, &arguments.list, &denials, false)?;
    context.print(&list, |list| {
        let entries = human::count(list.changed, "entry is new", "entries are new");
        format!("{entries}\n{}", lines(list))
    })
}

pub(crate) fn undeny(context: &Context, arguments: &DenyArguments) -> Result<(), Failure> {
    let denials = arguments.denials()?;
    let list = change(context, &arguments.list, &denials, true)?;
    if arguments.list.identity.is_none() {
        context.remark(
            "each node takes a denial back by itself: ask every node, or through an agent that knows them all",
        );
    }
    context.print(&list, |list| {
        let entries = human::count(list.changed, "entry is gone", "entries are gone");
        format!("{entries}\n{}", lines(list))
    })
}

pub(crate) fn denied(context: &Context, arguments: &ListArguments) -> Result<(), Failure> {
    let list = change(context, arguments, &[], false)?;
    context.print(&list, |list| match list.entries.is_empty() {
        true => "no certificate is denied".to_owned(),
        false => lines(list),
    })
}

fn lines(list: &Denials) -> String {
    list.entries.join("\n")
}

impl DenyArguments {
    fn denials(&self) -> Result<Vec<Denial>, Failure> {
        let mut denials = Vec::new();
        for serial in &self.serials {
            denials.push(Denial::serial(serial)?);
        }
        for holder in &self.holders {
            let (role, name) = holder.split_once('/').ok_or_else(|| {
                Failure::new(
                    Code::Invalid,
                    format!("{holder:?} is no ROLE/NAME, such as agent/c7"),
                )
            })?;
            denials.push(Denial::holder(role.parse::<Role>()?, name)?);
        }
        for directory in &self.certificates {
            let subject = Subject::in_directory(directory)?;
            denials.push(Denial::serial(&subject.serial)?);
        }
        Ok(denials)
    }
}

/// Adds denials to the selected list, or removes them from it. Returns the list afterwards.
fn change(
    context: &Context,
    list: &ListArguments,
    denials: &[Denial],
    take_back: bool,
) -> Result<Denials, Failure> {
    let Some(directory) = &list.identity else {
        let request = request::Deny {
            entries: denials.iter().map(Denial::to_string).collect(),
            take_back,
        };
        return Ok(context.connect()?.call(request)?);
    };
    // Only beside a certificate: no program would read the list in another directory.
    Subject::in_directory(directory)?;
    let path = directory.join(DENIED);
    let mut known = DenyList::load(&path)?;
    let mut changed = 0;
    for denial in denials {
        let is_change = match take_back {
            true => known.remove(denial),
            false => known.insert(denial.clone())?,
        };
        changed += u64::from(is_change);
    }
    if changed > 0 {
        known.store(&path)?;
    }
    Ok(Denials {
        entries: known.iter().map(Denial::to_string).collect(),
        changed,
    })
}
