//! Makes a recording of the bytes that a client and a page server sent each other, as a proxy between them saw them:
//! `record_conversation CLIENT-BYTES SERVER-BYTES OUT-32 OUT-24`. Pages are replaced by made-up ones.

use std::error::Error;

use permafrost_protocol::pageserver::Dialect;
use permafrost_protocol::pageserver::recording::{Conversation, Keep};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let [client, server, out_32, out_24] = arguments.as_slice() else {
        return Err("usage: record_conversation CLIENT-BYTES SERVER-BYTES OUT-32 OUT-24".into());
    };
    let recorded = Conversation::capture(
        &std::fs::read(client)?,
        &std::fs::read(server)?,
        Keep::ZeroPagesOnly,
    )?;
    for (dialect, path) in [(Dialect::V32, out_32), (Dialect::V24, out_24)] {
        let conversation = recorded
            .in_dialect(dialect)
            .ok_or("the older dialect cannot say this")?;
        std::fs::write(path, conversation.encode())?;
    }
    Ok(())
}
