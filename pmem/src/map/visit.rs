//! Visiting all pages that a map consists of and refers to.

use super::{PageMap, RunKind};
use crate::error::PageError;
use crate::ids::PageNo;

impl PageMap {
    /// Calls `visit` for each node of the map, a page, and for the stored pages of each run. Reads the nodes, verified, and
    /// no other page.
    pub(crate) fn visit(&self, visit: &mut dyn FnMut(PageNo, u32)) -> Result<(), PageError> {
        if self.root().is_empty() {
            return Ok(());
        }
        let root = self.root().stored();
        let mut left = vec![(PageNo(root.node.get()), root.crc32.get(), root.level.get())];
        while let Some((location, crc32, level)) = left.pop() {
            let node = self.load(location, crc32, level)?;
            visit(location, 1);
            for entry in 0..node.entries {
                if level == 0 {
                    let run = node.run(entry)?;
                    if let RunKind::Stored { location, .. } = run.kind {
                        visit(location, run.pages);
                    }
                } else {
                    let child = node.child(entry);
                    left.push((PageNo(child.node.get()), child.crc32.get(), level - 1));
                }
            }
        }
        Ok(())
    }
}
