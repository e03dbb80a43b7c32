//! Cost of admission for a dump with an empty queue before it, and for one beside many that wait or have reserved
//! places: taking the slot and giving it back.

use std::sync::Arc;

use divan::Bencher;
use permafrost_agent::host::Patiently;
use permafrost_metering::queues::{Admission, Direction, Queues, QueuesOptions};
use permafrost_protocol::control::request;

fn main() {
    divan::main();
}

fn queues(reserved: usize) -> Arc<Queues> {
    let queues = Queues::new(QueuesOptions::default());
    for _ in 0..reserved {
        let reserve = request::Reserve {
            direction: "write".to_owned(),
            bytes: 1 << 30,
            ..request::Reserve::default()
        };
        queues.reserve(&reserve).expect("a place");
    }
    queues
}

#[divan::bench(args = [0, 256])]
fn turn(bencher: Bencher<'_, '_>, reserved: usize) {
    let queues = queues(reserved);
    let admission = Admission {
        bytes: 1 << 30,
        ..Admission::default()
    };
    bencher.bench_local(|| {
        let turn = queues.enter(Direction::Write, &admission, &mut Patiently);
        turn.expect("a turn").moved(1 << 30);
    });
}

#[divan::bench(args = [0, 256])]
fn report(bencher: Bencher<'_, '_>, reserved: usize) {
    let queues = queues(reserved);
    bencher.bench_local(|| queues.report());
}
