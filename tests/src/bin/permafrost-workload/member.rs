//! The other processes of a tree, and the pipes to and from them. A line each way: `modify` → `ok`;
//! `verify` → `bad PAGES token TOKEN`.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::Options;
use crate::memory::Memory;
use crate::shared::Shared;
use crate::ticker::Ticker;

/// Share of the root's memory that a member fills.
const MEMORY_DIVISOR: usize = 16;

/// The root's end.
pub(crate) struct Members {
    members: Vec<Member>,
    pages_each: u64,
}

struct Member {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Members {
    /// Starts them and waits until each has filled its memory.
    pub(crate) fn start(options: &Options, shared: Option<&Shared>) -> Result<Self> {
        let mut members = Vec::new();
        for index in 0..options.members {
            let mut command = Command::new(std::env::current_exe().context("find this program")?);
            command.arg("--dir").arg(&options.dir);
            command.args([
                "--member",
                &index.to_string(),
                "--size-mib",
                &options.size_mib.to_string(),
            ]);
            command.args([
                "--contents",
                &options.contents.to_string(),
                "--seed",
                &options.seed.to_string(),
            ]);
            command.args(["--threads", &options.threads.to_string()]);
            command.args(["--modify-percent", &options.modify_percent.to_string()]);
            if let Some(shared) = shared {
                command.args(["--shared-fd", &shared.fd().to_string()]);
            }
            let mut child = command
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .with_context(|| format!("start member {index}"))?;
            let to = child.stdin.take().context("take the member's stdin")?;
            let from = BufReader::new(child.stdout.take().context("take the member's stdout")?);
            let mut member = Member { child, to, from };
            if member.hear()? != "ready" {
                bail!("member {index} does not get ready");
            }
            members.push(member);
        }
        let pages_each = u64::try_from(memory_bytes(options) / permafrost_protocol::PAGE_SIZE)?;
        Ok(Self {
            members,
            pages_each,
        })
    }

    pub(crate) fn pids(&self) -> Vec<u32> {
        self.members
            .iter()
            .map(|member| member.child.id())
            .collect()
    }

    pub(crate) fn pages(&self) -> u64 {
        self.pages_each * u64::try_from(self.members.len()).unwrap_or(0)
    }

    /// Has each modify its memory; says what went wrong.
    pub(crate) fn modify(&mut self) -> Vec<String> {
        self.each("modify", |answer| {
            if answer == "ok" {
                Ok(())
            } else {
                Err(format!("says {answer:?}"))
            }
        })
    }

    /// Has each check its memory and the shared one; bad pages, and what else went wrong.
    pub(crate) fn verify(&mut self, token: Option<u64>) -> (u64, Vec<String>) {
        let mut bad_pages = 0;
        let faults = self.each("verify", |answer| {
            let words: Vec<&str> = answer.split(' ').collect();
            let ["bad", bad, "token", seen] = words[..] else {
                return Err(format!("says {answer:?}"));
            };
            bad_pages += bad.parse::<u64>().map_err(|error| error.to_string())?;
            match token {
                Some(token) if seen != token.to_string() => {
                    Err(format!("reads {seen} where {token} was written"))
                }
                _ => Ok(()),
            }
        });
        (bad_pages, faults)
    }

    fn each(
        &mut self,
        ask: &str,
        mut check: impl FnMut(&str) -> Result<(), String>,
    ) -> Vec<String> {
        let mut faults = Vec::new();
        for member in &mut self.members {
            let checked = member
                .ask(ask)
                .map_err(|error| format!("{error:#}"))
                .and_then(|answer| check(&answer));
            if let Err(fault) = checked {
                faults.push(format!("member {}: {fault}", member.child.id()));
            }
        }
        faults
    }
}

impl Member {
    fn ask(&mut self, line: &str) -> Result<String> {
        writeln!(self.to, "{line}").context("write to the pipe")?;
        self.hear()
    }

    fn hear(&mut self) -> Result<String> {
        let mut line = String::new();
        if self
            .from
            .read_line(&mut line)
            .context("read from the pipe")?
            == 0
        {
            bail!("the pipe has ended");
        }
        Ok(line.trim_end().to_owned())
    }
}

/// A member's own life.
pub(crate) fn run(index: u32, options: &Options) -> Result<()> {
    let mut memory = Memory::filled(
        memory_bytes(options),
        options.contents,
        options.seed + 1 + u64::from(index),
    );
    let shared = options
        .shared_fd
        .map(|fd| Shared::inherited(fd, options.seed))
        .transpose()?;
    let ticker = Ticker::start(options.threads);
    println!("ready");
    for line in std::io::stdin().lines() {
        match line.context("read from the pipe")?.as_str() {
            "modify" => {
                memory.modify(options.modify_percent);
                println!("ok");
            }
            "verify" => {
                let found = memory.verify();
                let mut bad = found.bad_pages + u64::from(found.checksum != memory.checksum_kept());
                let mut token = 0;
                if let Some(shared) = &shared {
                    bad += shared.verify()?;
                    token = shared.token()?;
                }
                bad += u64::from(ticker.verify().is_some());
                println!("bad {bad} token {token}");
            }
            other => bail!("asked to {other:?}"),
        }
    }
    Ok(())
}

fn memory_bytes(options: &Options) -> usize {
    (options.size_mib << 20) / MEMORY_DIVISOR
}
