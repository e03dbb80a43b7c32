//! Checks that plots are well-formed XML and contain the required texts.

use std::fs;

use super::*;
use crate::fit::Fit;
use crate::tiers::paper::Table3;

/// Checks that an SVG is well-formed: every element is closed by its own name, in order. Returns all text.
fn text_of(svg: &str) -> String {
    let (mut open, mut words, mut rest) = (Vec::new(), String::new(), svg);
    while let Some(at) = rest.find('<') {
        words.push_str(&rest[..at]);
        let end = at + rest[at..].find('>').expect("a tag that is not closed");
        let tag = &rest[at + 1..end];
        assert!(!tag.contains('<'), "{tag}");
        assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name));
        } else if !tag.ends_with('/') && !tag.starts_with(['?', '!']) {
            open.push(tag.split_whitespace().next().unwrap());
        }
        rest = &rest[end + 1..];
    }
    assert!(open.is_empty(), "{open:?}");
    let entities = words.split('&').skip(1);
    for entity in entities {
        assert!(entity.contains(';'), "{entity}");
    }
    words.replace("&apos;", "'")
}

fn picture(paint: impl FnOnce(&Canvas<'_>) -> Result<(), String>) -> String {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("picture.svg");
    draw(&path, paint).unwrap();
    text_of(&fs::read_to_string(path).unwrap())
}

fn fit(tier: &str, emulated: bool, points: &[(u64, f64)]) -> TierFit {
    TierFit {
        tier: tier.to_owned(),
        emulated,
        copies: Copies::Local,
        suspend_and_resume: Fit::through(points),
        points: points.to_vec(),
    }
}

#[test]
fn figure_2_names_its_tiers_and_what_is_emulated() {
    let one = fit("hdd", true, &[(1 << 30, 60.0), (5 << 30, 310.0)]);
    let other = fit("disk", false, &[(1 << 30, 2.0)]);
    let words = picture(|canvas| figure_2(canvas, Copies::Local, &[&one, &other]));
    assert!(words.contains("hdd (emulated)"), "{words}");
    assert!(words.contains("disk"), "{words}");
    assert!(!words.contains("disk (emulated)"), "{words}");
    assert!(words.contains("emulated where it says so"), "{words}");
    let words = picture(|canvas| figure_2(canvas, Copies::Local, &[&other]));
    assert!(!words.contains("emulated"), "{words}");
}

#[test]
fn a_picture_of_nothing_much_is_a_picture() {
    let empty = fit("a", false, &[(1 << 30, 0.0)]);
    picture(|canvas| figure_2(canvas, Copies::Local, &[&empty]));
    picture(|canvas| horizontal_bars(canvas, "a < b & c", &[]));
    picture(|canvas| against_bandwidth(canvas, "", "", &[]));
}

#[test]
fn table_3_has_the_papers_bars_marked_as_theirs() {
    let dump = SecondDump {
        tier: "hdd".to_owned(),
        emulated: true,
        copies: Copies::Local,
        size_bytes: 1_000_000_000,
        dirty_percent: 10,
        first_s: 34.0,
        second_s: 3.4,
        ratio: 10.0,
        stored_ratio: 10.0,
        paper: Table3::of("hdd"),
    };
    let words = picture(|canvas| table_3(canvas, Copies::Local, &[&dump]));
    for said in [
        "hdd (emulated): first",
        "hdd (emulated): 10 % dirty",
        "the paper's HDD: first",
        // 169.18 s of 5 GB.
        "33.836",
        "34.000",
    ] {
        assert!(words.contains(said), "{said}: {words}");
    }
}

#[test]
fn axes_hold_what_is_drawn() {
    assert_eq!(around([1.0, 100.0].into_iter()), 0.5..200.0);
    assert_eq!(around([f64::NAN, 0.0].into_iter()), 0.1..10.0);
    assert_eq!(up_to([f64::INFINITY].into_iter()), 1.0);
    assert!(up_to([100.0].into_iter()) > 100.0);
}
