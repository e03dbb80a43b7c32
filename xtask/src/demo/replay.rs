//! Demonstration for machines on which CRIU cannot run: replays a conversation of CRIU 4.2.1 with a page server
//! against `permafrostd`.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use permafrost_protocol::PAGE_SIZE;
use permafrost_protocol::pageserver::recording::{Conversation, Step};
use permafrost_tests::daemon::Daemon;

use crate::rig::{self, Interrupt};
use crate::{paths, table, ui};

/// Opens a session, sends the recording to it, adopts it with the recorded small images; then does the same again as
/// a second dump, and reads it back.
pub(super) fn run(dir: &Path, daemon: &Daemon, interrupt: &Interrupt) -> Result<()> {
    let fixtures = paths::workspace().join("protocol/tests/fixtures");
    let recording = fixtures.join("criu-4.2.1.conversation");
    let bytes =
        std::fs::read(&recording).with_context(|| format!("read {}", recording.display()))?;
    let conversation = Conversation::decode(&bytes).context("decode the recording")?;
    let images = fixtures.join("criu-4.2.1-images");
    let mut rows = vec![
        [
            "",
            "memory image",
            "zero",
            "equal to the parent's",
            "bytes stored",
            "conversation",
        ]
        .map(str::to_owned)
        .to_vec(),
    ];
    for name in ["first dump", "second dump"] {
        interrupt.check()?;
        let task = ui::Task::begin(&format!("replay ({name})"));
        let opened = daemon.json(&["open", "--job", "demo"])?;
        let text = |field: &str| {
            let value = rig::field(&opened, field).and_then(serde_json::Value::as_str);
            value
                .map(str::to_owned)
                .with_context(|| format!("`permafrost open` names no {field}"))
        };
        let (session, address) = (text("session")?, text("address")?);
        let start = Instant::now();
        hold(&conversation, &address)?;
        let took = start.elapsed();
        // The recording keeps no image of the tasks' registers, so this can only be a pre-dump.
        daemon.run(&[
            "adopt".as_ref(),
            "--job".as_ref(),
            "demo".as_ref(),
            "--images-dir".as_ref(),
            images.as_os_str(),
            // They were recorded some time ago.
            "--ignore-times".as_ref(),
            session.as_ref(),
        ])?;
        let checkpoint = daemon.json(&["show", "demo"])?;
        task.done("stored, adopted");
        let mut row = vec![name.to_owned()];
        row.extend(
            ["memory_bytes", "zero_bytes", "parent_bytes", "added_bytes"]
                .map(|field| rig::mib(rig::number(&checkpoint, field))),
        );
        row.push(format!("{:.0} ms", took.as_secs_f64() * 1e3));
        rows.push(row);
    }
    let task = ui::Task::begin("read it back");
    let out = dir.join("exported");
    daemon.run(&["get".as_ref(), "demo".as_ref(), out.as_os_str()])?;
    daemon.run(&["verify"])?;
    let exported: u64 = std::fs::read_dir(&out)
        .context("list the exported images")?
        .flatten()
        .filter_map(|entry| {
            let is_pages = entry.file_name().to_string_lossy().starts_with("pages-");
            is_pages.then(|| entry.metadata().map_or(0, |metadata| metadata.len()))
        })
        .sum();
    let sent = payload_bytes(&conversation);
    ensure!(
        exported == sent,
        "{exported} bytes of pages came back, {sent} were sent"
    );
    task.done(&format!(
        "{} of pages, every checksum right",
        rig::mib(exported)
    ));
    println!("\n{}", table::render(&rows));
    Ok(())
}

/// Plays the client's side of the conversation.
fn hold(conversation: &Conversation, address: &str) -> Result<()> {
    let mut socket =
        TcpStream::connect(address).with_context(|| format!("connect to {address}"))?;
    socket.set_nodelay(true).context("set TCP_NODELAY")?;
    socket
        .set_read_timeout(Some(Duration::from_secs(30)))
        .context("set a time limit")?;
    let mut page = [0; PAGE_SIZE];
    for step in conversation.steps() {
        match step {
            Step::Frame(frame) => socket.write_all(frame.as_ref()).context("send a frame")?,
            Step::Pages { count, content } => {
                for index in 0..*count {
                    content.fill(index, &mut page);
                    socket.write_all(&page).context("send a page")?;
                }
            }
            Step::Reply(reply) => {
                let mut answer = vec![0; reply.len()];
                socket.read_exact(&mut answer).context("read a reply")?;
                // A status; has_parent is 1 byte or says only whether there was one.
                let is_last = std::ptr::eq(step, conversation.steps().last().unwrap_or(step));
                ensure!(
                    !is_last || answer.iter().all(|&byte| byte == 0),
                    "permafrostd answers CLOSE with {answer:?}"
                );
            }
        }
    }
    socket
        .shutdown(Shutdown::Write)
        .context("end the conversation")?;
    Ok(())
}

fn payload_bytes(conversation: &Conversation) -> u64 {
    let pages: u64 = conversation
        .steps()
        .iter()
        .map(|step| {
            if let Step::Pages { count, .. } = step {
                u64::from(*count)
            } else {
                0
            }
        })
        .sum();
    pages * u64::try_from(PAGE_SIZE).unwrap_or(0)
}
