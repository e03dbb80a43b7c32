//! Tests of connections that end when a certificate is no longer valid, and move to a new connection when it is
//! renewed.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use permafrost_identity::{Authority, CertificateOrder, Denial, ReloadingIdentity, Role};
use permafrost_transport::peer::{Network, PeerError, PeerOptions};

use super::site::{Site, deadline, ping};

/// Time limit for events that take less than a second on an idle machine.
const LIMIT: Duration = Duration::from_secs(60);

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < LIMIT, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns a network that connects to the site under an identity.
fn network(site: &Site, identity: &Arc<ReloadingIdentity>) -> Network {
    let address = site.address();
    Network::new(
        site.runtime.handle().clone(),
        (std::net::Ipv4Addr::LOCALHOST, 0).into(),
        Arc::clone(identity),
        "",
        Arc::new(move |_: &str| Some(address)),
        PeerOptions {
            reconnect: Duration::from_millis(500),
            ..PeerOptions::default()
        },
    )
    .unwrap()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_millis(700)
}

fn refused(network: &Network) -> bool {
    match network.call("there", ping(), soon()) {
        Ok(_) => false,
        Err(PeerError::Refused { error, .. }) => panic!("answered: {}", error.message),
        Err(_) => true,
    }
}

#[test]
fn whoever_is_denied_is_cut_off_at_once_and_stays_out_until_it_is_taken_back() {
    let site = Site::new(PeerOptions::default());
    let (thief, honest) = (
        site.identity("thief", Role::Agent),
        site.identity("honest", Role::Agent),
    );
    let (thiefs, honests) = (network(&site, &thief), network(&site, &honest));
    for network in [&thiefs, &honests] {
        network.call("there", ping(), deadline()).unwrap();
    }
    assert_eq!(site.endpoint.open_connections(), 2);
    let own = site.endpoint.identity();
    let serial = Denial::serial(&thief.current().subject().serial).unwrap();
    assert_eq!(own.deny([&serial]).unwrap(), 1);
    until("the end of the connection", || {
        site.endpoint.open_connections() == 1
    });
    assert!(refused(&thiefs), "it came back");
    honests.call("there", ping(), deadline()).unwrap();

    // A denial by name also refuses a newly issued certificate.
    let holder = Denial::holder(Role::Agent, "honest").unwrap();
    own.deny([&holder]).unwrap();
    let place = site.directory.path().join("honest");
    site.authority.reissue(&place, None).unwrap();
    assert!(honest.reload().unwrap());
    assert!(refused(&honests));
    assert_eq!(own.undeny(&[serial, holder]).unwrap(), 2);
    for network in [&thiefs, &honests] {
        network.call("there", ping(), deadline()).unwrap();
    }
}

#[test]
fn a_list_that_is_put_beside_the_certificate_is_read() {
    let site = Site::new(PeerOptions::default());
    let agent = site.identity("c7", Role::Agent);
    let network = network(&site, &agent);
    network.call("there", ping(), deadline()).unwrap();
    // The agent refuses the node: both sides of a connection look.
    let list = site.directory.path().join("c7/denied");
    std::fs::write(&list, "name node there\n").unwrap();
    assert!(agent.reload().unwrap());
    until("the end of the connection", || {
        site.endpoint.open_connections() == 0
    });
    assert!(refused(&network));
    // An invalid list takes no denial back.
    std::fs::write(&list, "name nobody there\n").unwrap();
    assert!(agent.reload().is_err());
    assert!(refused(&network));
}

#[test]
fn a_connection_ends_with_its_certificate() {
    let site = Site::new(PeerOptions::default());
    let place = site.directory.path().join("brief");
    let (now, order) = (
        SystemTime::now(),
        CertificateOrder::new("brief", Role::Agent),
    );
    let over = now + Duration::from_secs(3);
    site.authority
        .issue_for(&order, now - Duration::from_secs(60), over, &place, false)
        .unwrap();
    let brief = Arc::new(ReloadingIdentity::load(&place).unwrap());
    let network = network(&site, &brief);
    network.call("there", ping(), deadline()).unwrap();
    until("the end of the connection", || {
        site.endpoint.open_connections() == 0
    });
    assert!(SystemTime::now() >= over, "it ended before its time");
    assert!(refused(&network));
}

#[test]
fn a_connection_ends_when_its_ca_is_retired_and_others_go_on() {
    let site = Site::new(PeerOptions::default());
    let old = site.identity("old", Role::Agent);
    let next = site.authority.succeed("test").unwrap();
    let order = CertificateOrder::new("new", Role::Agent);
    let place = site.directory.path().join("new");
    next.issue(&order, &place, false).unwrap();
    let new = Arc::new(ReloadingIdentity::load(&place).unwrap());
    let own = site.endpoint.identity();
    let there = site.directory.path().join("there");
    next.reissue(&there, None).unwrap();
    assert!(own.reload().unwrap());

    let (olds, news) = (network(&site, &old), network(&site, &new));
    for network in [&olds, &news] {
        network.call("there", ping(), deadline()).unwrap();
    }
    next.retire().unwrap();
    let retired = Authority::open(&site.directory.path().join("ca")).unwrap();
    retired.reissue(&there, None).unwrap();
    assert!(own.reload().unwrap());
    until("the end of the connection", || {
        site.endpoint.open_connections() == 1
    });
    assert!(refused(&olds));
    news.call("there", ping(), deadline()).unwrap();
}

#[test]
fn a_connection_is_made_anew_when_the_own_certificate_is_renewed() {
    let site = Site::new(PeerOptions::default());
    let agent = site.identity("c7", Role::Agent);
    let network = network(&site, &agent);
    network.call("there", ping(), deadline()).unwrap();
    let first = network.stats("there").unwrap();
    network.call("there", ping(), deadline()).unwrap();
    assert!(network.stats("there").unwrap().udp_tx.bytes > first.udp_tx.bytes);

    let before = agent.current().subject().serial.clone();
    let place = site.directory.path().join("c7");
    site.authority.reissue(&place, None).unwrap();
    assert!(agent.reload().unwrap());
    // Denying the old certificate ends no connection that uses the new one.
    network.call("there", ping(), deadline()).unwrap();
    let old = Denial::serial(&before).unwrap();
    assert_eq!(site.endpoint.identity().deny([&old]).unwrap(), 1);
    until("the end of the old connection", || {
        site.endpoint.open_connections() == 1
    });
    network.call("there", ping(), deadline()).unwrap();
}
