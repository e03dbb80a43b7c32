//! Limits of the transport, and the tuning of quinn.

use std::sync::Arc;
use std::time::Duration;

use permafrost_protocol::versions::{self, Interface, VersionRange};
use quinn::congestion::CubicConfig;
use quinn::{AckFrequencyConfig, IdleTimeout, MtuDiscoveryConfig, TransportConfig, VarInt};

/// Number of packets that are acknowledged together, as long as none is missing. Each acknowledgement costs
/// both ends about as much as a small packet.
const ACKNOWLEDGED_PACKETS: u32 = 40;
/// Longest delay of an acknowledgement: a link whose congestion window is smaller than that number of packets
/// waits for so long.
const MAX_ACK_DELAY: Duration = Duration::from_millis(2);
/// First congestion window, bytes: more than [`ACKNOWLEDGED_PACKETS`] of 1,500 bytes. A slower start is of no
/// use between nodes of one site.
const INITIAL_WINDOW_BYTES: u64 = 256 << 10;

/// Conditions for the compression of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// Pages are never compressed.
    Off,
    /// Pages are compressed if the link is slower than the codec and a sample of them looks compressible.
    #[default]
    Adaptive,
    /// Pages are compressed if a sample of them looks compressible.
    Always,
}

/// Limits of the transport. quinn's own defaults suit a 100 Mbit/s WAN.
#[derive(Clone, Debug)]
pub struct PeerOptions {
    /// Number of sockets (and quinn endpoints) for outgoing connections; each is one task, so one core. Default
    /// 1.
    pub sockets: usize,
    /// Largest UDP payload tried, bytes: MTU discovery goes up to it. 8,972 fills jumbo frames; on a path of
    /// 1,500 its only cost is a few lost probes. Default 8,972.
    pub packet_bytes: u16,
    /// UDP payload that every path is known to carry, bytes; 1,200 is what QUIC demands. Default 1,200.
    pub assured_packet_bytes: u16,
    /// Socket buffers requested, bytes; the kernel's `net.core.[rw]mem_max` may give less. Default 8 MiB.
    pub socket_buffer_bytes: usize,
    /// Most bytes that a peer may send on one stream before they are read. Default 32 MiB.
    pub stream_window_bytes: u32,
    /// Most bytes that a peer may send on a whole connection before they are read. Default 64 MiB.
    pub connection_window_bytes: u32,
    /// Most bytes handed to a connection that QUIC has not acknowledged. More than the link's bandwidth times
    /// its round trip only grows cold in memory before it is sent: this is 1 GB/s at 8 ms. Default 8 MiB.
    pub send_window_bytes: u32,
    /// Frames of one dump that are kept until the peer has acknowledged them, bytes. Default 32 MiB.
    pub dump_window_bytes: usize,
    /// Streams of each kind that a peer may have open on a connection. Default 64.
    pub streams: u32,
    /// Most connections accepted from all peers together. Default 256.
    pub connections: usize,
    /// Most handshakes under way at once. Default 64.
    pub handshakes: usize,
    /// Most conversations served at once, of dumps and of fetches, each. Default 64.
    pub conversations: usize,
    /// Time limit of a handshake. Default 5 s.
    pub handshake_timeout: Duration,
    /// Time limit for a Hello and a Request, or a preamble, however slowly its bytes come. Default 10 s.
    pub request_timeout: Duration,
    /// A dump's bulk stream that brings nothing, or takes nothing, for this long counts as lost, as does a
    /// frame that is not whole by then. CRIU pauses between frames, not within one. Default 10 s.
    pub frame_timeout: Duration,
    /// Silence after which a connection is lost. Default 6 s.
    pub idle_timeout: Duration,
    /// Interval of keep-alives. Default 1.5 s.
    pub keep_alive: Duration,
    /// Time for which a sender tries to restore a lost connection. Default 20 s.
    pub reconnect: Duration,
    /// Time after which the sender gives up a peer that accepts nothing while the window is full: CRIU's task
    /// is frozen meanwhile. Longer than `reconnect`, or a lost connection is reported as a slow peer. Default
    /// 50 s.
    pub stall: Duration,
    /// Time for which a receiver keeps a dump whose connection is lost. Default 30 s.
    pub grace: Duration,
    /// Silence of a sender in the middle of its dump, or before its commit, after which the receiver gives the dump up.
    /// Keep-alives do not count, nor does the time that the receiver itself takes. Default 10 minutes.
    pub dump_idle: Duration,
    /// Time for which a receiver waits for a dump's first frame, and after [`Close`](super::Kind::Close) for
    /// the next one: CRIU has not begun, or its dump is not sealed yet. Default 1 hour.
    pub dump_wait: Duration,
    /// Send and take the pages of dumps over TLS on TCP, where the other end does so too. Default true.
    pub tls_bulk: bool,
    /// Conditions for the compression of pages. Default adaptive.
    pub compression: Compression,
    /// Versions of the wire that are spoken. Default those of this process.
    pub wire: VersionRange,
}

impl Default for PeerOptions {
    fn default() -> Self {
        Self {
            sockets: 1,
            packet_bytes: 8972,
            assured_packet_bytes: 1200,
            socket_buffer_bytes: 8 << 20,
            stream_window_bytes: 32 << 20,
            connection_window_bytes: 64 << 20,
            send_window_bytes: 8 << 20,
            dump_window_bytes: 32 << 20,
            streams: 64,
            connections: 256,
            handshakes: 64,
            conversations: 64,
            handshake_timeout: Duration::from_secs(5),
            request_timeout: Duration::from_secs(10),
            frame_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(6),
            keep_alive: Duration::from_millis(1500),
            reconnect: Duration::from_secs(20),
            stall: Duration::from_secs(50),
            grace: Duration::from_secs(30),
            dump_idle: Duration::from_secs(10 * 60),
            dump_wait: Duration::from_secs(60 * 60),
            tls_bulk: true,
            compression: Compression::Adaptive,
            wire: versions::own().of(Interface::Wire),
        }
    }
}

impl PeerOptions {
    /// Returns quinn's transport parameters.
    #[must_use]
    pub fn transport(&self) -> Arc<TransportConfig> {
        let mut discovery = MtuDiscoveryConfig::default();
        discovery.upper_bound(self.packet_bytes);
        let mut acks = AckFrequencyConfig::default();
        acks.ack_eliciting_threshold(VarInt::from_u32(ACKNOWLEDGED_PACKETS))
            .max_ack_delay(Some(MAX_ACK_DELAY));
        let mut congestion = CubicConfig::default();
        congestion.initial_window(INITIAL_WINDOW_BYTES);
        let idle = IdleTimeout::try_from(self.idle_timeout)
            .unwrap_or_else(|_| IdleTimeout::from(VarInt::from_u32(6000)));
        let mut transport = TransportConfig::default();
        transport
            .stream_receive_window(VarInt::from_u32(self.stream_window_bytes))
            .receive_window(VarInt::from_u32(self.connection_window_bytes))
            .send_window(self.send_window_bytes.into())
            .congestion_controller_factory(Arc::new(congestion))
            .max_concurrent_bidi_streams(VarInt::from_u32(self.streams))
            .max_concurrent_uni_streams(VarInt::from_u32(self.streams))
            .max_idle_timeout(Some(idle))
            .keep_alive_interval(Some(self.keep_alive))
            .initial_rtt(Duration::from_millis(1))
            .initial_mtu(self.assured_packet_bytes)
            .mtu_discovery_config(Some(discovery))
            .ack_frequency_config(Some(acks))
            // Datagrams are not spoken here.
            .datagram_receive_buffer_size(None);
        Arc::new(transport)
    }
}
