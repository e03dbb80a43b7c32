//! Restores whose pages `permafrostd` places in the processes before they run.
//!
//! ```text
//!   permafrost ── Export without lazy pages ──▶ images directory
//!   permafrost ── Place ──▶ permafrostd ◀── lazy-pages.socket ── CRIU: processes and their userfaultfds
//!                                       ◀── placement.socket ─── permafrost-action, for which CRIU waits
//! ```
//!
//! CRIU lets the processes run only if the script succeeds, and the script only if `permafrostd` says that all pages are
//! there. So whoever fails or is ended before, nothing of the restore runs.

use std::fs;
use std::io;
use std::path::Path;
use std::time::Instant;

use permafrost_criu::restore_way::{ChosenRestoreWay, RestoreWayReason, SMALL_PART};
use permafrost_criu::scratch::create_private;
use permafrost_criu::{Criu, CriuRun};
use permafrost_protocol::control::{Exported, request};
use permafrost_protocol::images::{Mapping, mm_name, read_mappings};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::Failure;
use permafrost_terminal::interrupt::Interrupts;
use permafrost_transport::control::Connection;

use crate::delivery::{self, Delivered, Delivery, HeldRestore, Tasks, Wanted};

/// Bytes that the images directory may have whatever the size of the checkpoint: small images, stacks, data of libraries.
const EAGER_BYTES: u64 = 16 << 20;

impl HeldRestore {
    /// Runs CRIU, and has the daemon place the pages. Streams instead if the images turn out not to be fit for that.
    pub(crate) fn place(
        self,
        context: &Context,
        interrupts: &Interrupts,
        mut connection: Connection,
        wanted: Wanted<'_>,
        (mut run, criu, tasks): (CriuRun, &Criu, &Tasks),
    ) -> Result<Delivered, Failure> {
        let started = Instant::now();
        let exported = delivery::fetch(context, &mut connection, wanted, interrupts, true)?;
        if let Some(reason) = unfit(&exported, wanted, tasks) {
            empty(wanted.images).map_err(|error| Failure::io("empty", wanted.images, &error))?;
            let delivery = Delivery::stream(wanted.images)?;
            let way = delivery.way();
            let programs = (run, criu, tasks);
            let delivered = delivery.run(context, interrupts, connection, wanted, programs)?;
            return Ok(Delivered {
                instead: Some(ChosenRestoreWay { way, reason }),
                ..delivered
            });
        }
        let fetch = started.elapsed();
        let Wanted { name, turn, .. } = wanted;
        let request = request::Place {
            checkpoint: name.to_owned(),
            priority: turn.priority,
            deadline_ms: turn.deadline_ms(),
            reservation: turn.reservation.token()?,
        };
        let Self { listener, action } = self;
        let turn = delivery::begin(
            context,
            interrupts,
            &mut connection,
            request,
            &listener,
            name,
        )?;
        // The daemon's descriptor is the only one now: if the daemon ends, CRIU and its script are refused.
        drop(listener);
        interrupts.check()?;
        HeldRestore::prepare_run(&mut run, &action);
        let finished = tasks.watch(run.start(criu)?, interrupts, context)?;
        // A CRIU that failed before it connected must not be waited for.
        connection.end_requests();
        let placed = connection.finish::<request::Place>(&mut |_| {});
        Ok(Delivered {
            finished,
            turn,
            fetch,
            refusal: placed.err(),
            transfer: None,
            instead: None,
        })
    }
}

/// Returns the reason why an exported directory is not restored from, if there is one.
fn unfit(exported: &Exported, wanted: Wanted<'_>, tasks: &Tasks) -> Option<RestoreWayReason> {
    // Private memory may be locked, which the manifest does not tell.
    if exported.bytes > EAGER_BYTES.saturating_add(wanted.memory_bytes / SMALL_PART) {
        return Some(RestoreWayReason::EagerMemory);
    }
    let has_shadow_stack = |pid: &u32| {
        let image = fs::read(wanted.images.join(mm_name(*pid)));
        let mappings = image.ok().and_then(|bytes| read_mappings(&bytes).ok());
        mappings.is_some_and(|mappings| mappings.iter().any(Mapping::is_shadow_stack))
    };
    let any = tasks.pids.iter().any(has_shadow_stack);
    any.then_some(RestoreWayReason::ShadowStack)
}

/// Removes what is in an images directory.
fn empty(images: &Path) -> io::Result<()> {
    fs::remove_dir_all(images)?;
    create_private(images)
}
