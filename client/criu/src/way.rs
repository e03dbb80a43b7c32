//! Ways by which CRIU sends the pages of a dump, and the choice between them.

use serde::Serialize;

/// First release of CRIU, major and minor number, whose `--stream` is used unless it is asked for.
const STREAMING_CRIU: (u32, u32) = (3, 16);

/// Way by which CRIU sends the pages of a dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// In its page-server protocol, straight to `permafrostd`.
    PageServer,
    /// With all other images through pipes (`--stream`).
    Stream,
}

/// Reason for the way by which CRIU sends the pages of a dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum WayReason {
    /// It freezes the process for the shortest time, and the options allow it.
    Fastest,
    /// `--stream` or `--page-server` asks for it.
    Requested,
    /// The dump uses soft-dirty bits, for which CRIU needs its page-server protocol.
    SoftDirty,
    /// The CRIU is too old to send everything through pipes.
    OldCriu,
    /// The permafrostd, or the agent, is of a release that takes no pipes.
    OldDaemon,
    /// The memory of the processes has no room in the pipes that the kernel grants permafrostd or the agent
    /// (fs.pipe-user-pages-soft): the rest would be copied while they are frozen.
    FewPipes,
    /// The path of the directory in memory is too long for the socket to which a streaming CRIU connects.
    LongPath,
}

/// Way of a dump, and the reason for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChosenWay {
    /// The way.
    pub way: Way,
    /// The reason for it.
    pub reason: WayReason,
}

impl ChosenWay {
    /// Returns the text for the dump's output.
    #[must_use]
    pub fn describe(self) -> String {
        let (way, option) = match self.way {
            Way::Stream => ("through pipes", "--stream"),
            Way::PageServer => ("by CRIU's page-server protocol", "--page-server"),
        };
        let why = match self.reason {
            WayReason::Fastest => ", the fastest way",
            WayReason::Requested => return format!("{way} ({option})"),
            WayReason::SoftDirty => ", which soft-dirty bits need",
            WayReason::OldCriu => ": this CRIU is too old for --stream, or of an unknown version",
            WayReason::OldDaemon => ": this permafrostd takes no pipes",
            WayReason::FewPipes => {
                ": permafrostd may not have pipes for so much memory (fs.pipe-user-pages-soft)"
            }
            WayReason::LongPath => ": the path of the directory in memory is too long for --stream",
        };
        format!("{way}{why}")
    }
}

/// Conditions on which the way of a dump depends.
#[derive(Clone, Copy, Debug)]
pub struct WayConditions<'a> {
    /// Way that an option asks for.
    pub requested: Option<Way>,
    /// True if the dump uses soft-dirty bits.
    pub soft_dirty: bool,
    /// Version of CRIU, such as `4.2.1`.
    pub criu_version: &'a str,
    /// Memory of the processes, bytes.
    pub resident_bytes: u64,
    /// Bytes of pages that can wait in the daemon's pipes, reserved or free; 0 if it takes none.
    pub pipe_bytes: u64,
    /// True if a socket can be made in the directory for the images.
    pub fits: bool,
}

impl WayConditions<'_> {
    /// Returns the bytes of pages for which room in the daemon's pipes is to be reserved: none if the dump does not take
    /// them whatever room there is.
    #[must_use]
    pub fn wanted_pipe_bytes(&self) -> u64 {
        let free = Self {
            pipe_bytes: u64::MAX,
            ..*self
        };
        match free.choose().way {
            Way::Stream => self.resident_bytes,
            Way::PageServer => 0,
        }
    }

    /// Chooses the way: through pipes, which freezes large processes for a shorter time and others for as long
    /// (docs/performance.md), unless something stands against it.
    #[must_use]
    pub fn choose(&self) -> ChosenWay {
        if let Some(way) = self.requested {
            let reason = WayReason::Requested;
            return ChosenWay { way, reason };
        }
        let against = [
            (self.soft_dirty, WayReason::SoftDirty),
            (!streams(self.criu_version), WayReason::OldCriu),
            (self.pipe_bytes == 0, WayReason::OldDaemon),
            (self.resident_bytes > self.pipe_bytes, WayReason::FewPipes),
            (!self.fits, WayReason::LongPath),
        ];
        let against = against.into_iter().find(|(is_so, _)| *is_so);
        let (way, reason) = match against {
            Some((_, reason)) => (Way::PageServer, reason),
            None => (Way::Stream, WayReason::Fastest),
        };
        ChosenWay { way, reason }
    }
}

/// Returns true if a CRIU of this version, such as `4.2.1`, may be asked to send everything through pipes.
fn streams(version: &str) -> bool {
    let digits = |text: &str| -> Option<u32> {
        let end = text.find(|c: char| !c.is_ascii_digit());
        text[..end.unwrap_or(text.len())].parse().ok()
    };
    let mut numbers = version.split('.').map(digits);
    match (numbers.next(), numbers.next()) {
        (Some(Some(major)), Some(Some(minor))) => (major, minor) >= STREAMING_CRIU,
        (Some(Some(major)), None) => major > STREAMING_CRIU.0,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_of_criu_that_stream_are_told_from_others() {
        for version in ["3.16", "3.17.1", "3.100", "4.0", "4.2.1", "4.2-dev", "10.0"] {
            assert!(streams(version), "{version}");
        }
        for version in ["3.15.1", "3.6", "2.12", "3", "", "git", "-4.2"] {
            assert!(!streams(version), "{version}");
        }
    }

    #[test]
    fn pipes_are_taken_unless_something_stands_against_them() {
        let free = WayConditions {
            requested: None,
            soft_dirty: false,
            criu_version: "4.2.1",
            resident_bytes: 1 << 20,
            pipe_bytes: 1 << 20,
            fits: true,
        };
        let chosen = |conditions: &WayConditions<'_>| {
            let ChosenWay { way, reason } = conditions.choose();
            (way, reason)
        };
        assert_eq!(chosen(&free), (Way::Stream, WayReason::Fastest));
        for (conditions, reason) in [
            (
                WayConditions {
                    soft_dirty: true,
                    ..free
                },
                WayReason::SoftDirty,
            ),
            (
                WayConditions {
                    criu_version: "3.15",
                    ..free
                },
                WayReason::OldCriu,
            ),
            (
                WayConditions {
                    pipe_bytes: 0,
                    ..free
                },
                WayReason::OldDaemon,
            ),
            (
                WayConditions {
                    resident_bytes: (1 << 20) + 1,
                    ..free
                },
                WayReason::FewPipes,
            ),
            (
                WayConditions {
                    fits: false,
                    ..free
                },
                WayReason::LongPath,
            ),
        ] {
            assert_eq!(chosen(&conditions), (Way::PageServer, reason));
            let forced = WayConditions {
                requested: Some(Way::Stream),
                ..conditions
            };
            assert_eq!(chosen(&forced), (Way::Stream, WayReason::Requested));
            // Without room for it, room is asked for, and only then.
            let is_of_room = conditions.resident_bytes > free.resident_bytes;
            let wanted = match is_of_room || conditions.pipe_bytes == 0 {
                true => conditions.resident_bytes,
                false => 0,
            };
            assert_eq!(conditions.wanted_pipe_bytes(), wanted, "{reason:?}");
            assert_eq!(forced.wanted_pipe_bytes(), forced.resident_bytes);
        }
        let page_server = WayConditions {
            requested: Some(Way::PageServer),
            ..free
        };
        assert_eq!(page_server.wanted_pipe_bytes(), 0);
    }
}
