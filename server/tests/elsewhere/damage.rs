//! Reads on a node whose copy is damaged.

use std::sync::atomic::Ordering;

use permafrost_pmem::PAGE_SIZE;
use permafrost_protocol::control::{ErrorCode, ReportedError};

use super::support::{JOB, Memory, Site, memory};

/// Makes a checkpoint that both nodes hold.
fn site(memory: &Memory) -> (Site, String) {
    let site = Site::new(&[("me", "", ""), ("other", "", "")]);
    let sealed = site.dump(0, memory);
    site.copy(0, 1, &sealed);
    (site, sealed.id)
}

#[test]
fn a_damaged_page_comes_from_another_node_and_so_does_what_follows() {
    let memory = memory(1500);
    let (site, id) = site(&memory);
    let me = &site.nodes[0];
    site.check_stream(0, &memory);
    assert_eq!((site.nodes[1].asked(), me.damage_told().len()), (0, 0));

    // The first page, one within a run, the last.
    let indices: Vec<u64> = memory.keys().copied().collect();
    for place in [0, 777, 1499] {
        let index = indices[place];
        let at = me.find(&memory[&index]);
        assert_eq!(at.len(), 1);
        me.flip(at[0] + 99);
        site.check_stream(0, &memory);
        assert_eq!(site.nodes[1].pages_asked().pop(), Some((1, index)));
        assert_eq!(me.damage_told(), [id.as_str()]);

        site.check_get(0, &memory);
        let (_, from_index) = site.nodes[1].pages_asked().pop().unwrap();
        assert!(from_index <= index, "{from_index} {index}");
        assert_eq!(me.damage_told(), [id.as_str()]);

        // What this node passes on to other nodes is its own.
        let asked = site.nodes[1].asked();
        let fetch = me.store.local().open_fetch(&id, "").unwrap();
        assert!(fetch.runs(0, 0, 0).any(|run| run.is_err()));
        assert_eq!(site.nodes[1].asked(), asked);
        me.flip(at[0] + 99);
    }
    site.check_get(0, &memory);
    assert!(me.damage_told().is_empty());
}

#[test]
fn whatever_is_damaged_here_comes_from_the_other_node() {
    let memory = memory(300);
    let (site, id) = site(&memory);
    let me = &site.nodes[0];
    let region = me.region();
    let is_page = |page: &[u8]| memory.values().any(|of| of == page);
    let mut told = 0;
    let mut flipped = 0;
    for (n, page) in region.chunks(PAGE_SIZE).enumerate() {
        let is_blank = page.iter().all(|byte| *byte == 0);
        if is_blank || (is_page(page) && n % 40 > 0) {
            continue;
        }
        let used = page.iter().position(|byte| *byte != 0).unwrap();
        let at = (n * PAGE_SIZE + used) as u64;
        me.flip(at);
        site.check_get(0, &memory);
        if flipped % 3 == 0 {
            site.check_stream(0, &memory);
        }
        me.flip(at);
        flipped += 1;
        let damaged = me.damage_told();
        assert!(damaged.iter().all(|damaged| *damaged == id));
        told += usize::from(!damaged.is_empty());
    }
    // Pages, maps, the images and the manifest.
    println!("{flipped} flipped, {told} noticed");
    assert!(told >= 12, "{told} of {flipped}");
}

#[test]
fn damage_without_another_copy_is_an_error_that_names_it() {
    let memory = memory(1200);
    let (site, id) = site(&memory);
    let me = &site.nodes[0];
    let (index, page) = memory.iter().nth(600).unwrap();
    me.flip(me.find(page)[0]);
    site.nodes[1].watched.dies_after.store(0, Ordering::SeqCst);
    let error = site.get(0).map(drop).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Corrupt);
    let message = error.to_string();
    let address = format!("address {:#x}", index * PAGE_SIZE as u64);
    assert!(message.contains(&address), "{message}");
    assert_eq!(me.damage_told(), [id]);

    // And where both are damaged, at different places, neither is of use behind its own.
    let (site, _) = self::site(&memory);
    for (n, place) in [(0, 300), (1, 800)] {
        let page = memory.values().nth(place).unwrap();
        site.nodes[n].flip(site.nodes[n].find(page)[0]);
    }
    let error = site.get(0).map(drop).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Corrupt);
    assert_eq!(site.nodes[1].damage_told().len(), 1);
    assert_eq!(
        site.nodes[0]
            .store
            .list(Some(&JOB.parse().unwrap()))
            .unwrap()
            .len(),
        1
    );
}
