//! The UDP socket under quinn: large buffers, and batches that fit a datagram.
//!
//! quinn hands the kernel up to ten packets at once (GSO), and the kernel takes at most 65,507 bytes: ten
//! packets of more than 6,550 bytes are refused with EMSGSIZE, which quinn takes for a path that lost its MTU.
//! A batch that is too long is split here, and quinn is asked for shorter ones from then on.

use std::fmt;
use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, Runtime, TokioRuntime, UdpPoller};
use rustix::net::sockopt;

/// Most bytes that one call may send: a UDP datagram over IPv4.
const MAX_BATCH_BYTES: usize = 65_507;
/// Most bytes that GRO puts together.
const MAX_COALESCED_BYTES: usize = 65_536;

/// Binds a UDP socket with large buffers. Must be called within a tokio runtime.
///
/// # Errors
/// The socket cannot be bound. Buffers smaller than requested are not an error.
pub(crate) fn bind(
    address: SocketAddr,
    buffer_bytes: usize,
    packet_bytes: u16,
) -> io::Result<Arc<dyn AsyncUdpSocket>> {
    let socket = UdpSocket::bind(address)?;
    // The limit of an ordinary user is net.core.[rw]mem_max; privileged users may exceed it.
    if sockopt::set_socket_recv_buffer_size_force(&socket, buffer_bytes).is_err() {
        let _ = sockopt::set_socket_recv_buffer_size(&socket, buffer_bytes);
    }
    if sockopt::set_socket_send_buffer_size_force(&socket, buffer_bytes).is_err() {
        let _ = sockopt::set_socket_send_buffer_size(&socket, buffer_bytes);
    }
    let inner = TokioRuntime.wrap_udp_socket(socket)?;
    Ok(Arc::new(Batched {
        segments: AtomicUsize::new(usize::MAX),
        coalesced: MAX_COALESCED_BYTES.div_ceil(usize::from(packet_bytes).max(1)),
        inner,
    }))
}

/// A socket that never hands the kernel more than it accepts.
struct Batched {
    inner: Arc<dyn AsyncUdpSocket>,
    /// Most packets in a batch, as far as their size is known.
    segments: AtomicUsize,
    /// Most packets in a received batch: quinn allocates so many of the largest, 32 times over.
    coalesced: usize,
}

impl fmt::Debug for Batched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batched")
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}

impl AsyncUdpSocket for Batched {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Arc::clone(&self.inner).create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let Some(segment) = transmit.segment_size.filter(|segment| *segment > 0) else {
            return self.inner.try_send(transmit);
        };
        if transmit.contents.len() <= MAX_BATCH_BYTES {
            return self.inner.try_send(transmit);
        }
        let fitting = (MAX_BATCH_BYTES / segment).max(1);
        self.segments.fetch_min(fitting, Ordering::Relaxed);
        for part in transmit.contents.chunks(fitting * segment) {
            // WouldBlock in the middle makes quinn send all again: packets that come twice are dropped.
            self.inner.try_send(&Transmit {
                contents: part,
                ..transmit.clone()
            })?;
        }
        Ok(())
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        self.inner.poll_recv(cx, bufs, meta)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.inner
            .max_transmit_segments()
            .min(self.segments.load(Ordering::Relaxed))
    }

    fn max_receive_segments(&self) -> usize {
        self.inner.max_receive_segments().min(self.coalesced).max(1)
    }

    fn may_fragment(&self) -> bool {
        self.inner.may_fragment()
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    /// Takes what a kernel takes.
    #[derive(Debug, Default)]
    struct Kernel(Mutex<Vec<(usize, Option<usize>)>>);

    impl AsyncUdpSocket for Kernel {
        fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
            unreachable!("nobody waits here")
        }

        fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
            assert!(transmit.contents.len() <= MAX_BATCH_BYTES, "EMSGSIZE");
            let sent = (transmit.contents.len(), transmit.segment_size);
            self.0.lock().push(sent);
            Ok(())
        }

        fn poll_recv(
            &self,
            _: &mut Context<'_>,
            _: &mut [IoSliceMut<'_>],
            _: &mut [RecvMeta],
        ) -> Poll<io::Result<usize>> {
            Poll::Pending
        }

        fn local_addr(&self) -> io::Result<SocketAddr> {
            Ok(([127, 0, 0, 1], 1).into())
        }

        fn max_transmit_segments(&self) -> usize {
            64
        }

        fn max_receive_segments(&self) -> usize {
            64
        }
    }

    #[test]
    fn batches_too_long_for_a_datagram_are_split_and_then_avoided() {
        let kernel = Arc::new(Kernel::default());
        let socket = Batched {
            inner: Arc::clone(&kernel) as Arc<dyn AsyncUdpSocket>,
            segments: AtomicUsize::new(usize::MAX),
            coalesced: 8,
        };
        assert_eq!(socket.max_transmit_segments(), 64);
        let contents = vec![0; 9 * 8972 + 100];
        let transmit = |bytes: usize, segment_size| Transmit {
            destination: ([127, 0, 0, 1], 1).into(),
            ecn: None,
            contents: &contents[..bytes],
            segment_size,
            src_ip: None,
        };
        socket.try_send(&transmit(10 * 1452, Some(1452))).unwrap();
        assert_eq!(socket.max_transmit_segments(), 64);
        socket
            .try_send(&transmit(contents.len(), Some(8972)))
            .unwrap();
        assert_eq!(socket.max_transmit_segments(), 7);
        assert_eq!(socket.max_receive_segments(), 8);
        let sent = kernel.0.lock().clone();
        let parts = [
            (14_520, Some(1452)),
            (7 * 8972, Some(8972)),
            (2 * 8972 + 100, Some(8972)),
        ];
        assert_eq!(sent, parts);
    }
}
