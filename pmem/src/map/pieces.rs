//! Log of appended pages, for callers that pass them on: tells for each page whether it was stored.

/// Consecutive pages with one kind of storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Index of the first one.
    pub first_index: u64,
    /// Number of pages, at least 1.
    pub pages: u64,
    /// Flags of the pages.
    pub flags: u16,
    /// Storage of the pages.
    pub kept: Kept,
}

/// Storage of a page that was appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// Written to the shadow, for this object or for another one that has it at the same index.
    Stored,
    /// Zero page: stored nowhere.
    Zero,
    /// Page that the parent has at this index; of a whole block, zero pages too.
    Parent,
}

/// Pieces since the last call of `drain`; neighbours with one kind of storage are one piece.
#[derive(Default)]
pub(super) struct PieceLog(Vec<Piece>);

impl PieceLog {
    pub(super) fn push(&mut self, piece: Piece) {
        match self.0.last_mut() {
            Some(last)
                if last.kept == piece.kept
                    && last.flags == piece.flags
                    && last.first_index + last.pages == piece.first_index =>
            {
                last.pages += piece.pages;
            }
            _ => self.0.push(piece),
        }
    }

    pub(super) fn drain(&mut self) -> std::vec::Drain<'_, Piece> {
        self.0.drain(..)
    }
}
