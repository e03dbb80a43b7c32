//! Tests of peers over real QUIC and TLS on the loopback interface.

mod bulk;
mod fetch;
mod interruptions;
mod misbehaviour;
mod round_trip;
mod site;
mod trust;
mod under_load;
mod versions;
