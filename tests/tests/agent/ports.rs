//! Ports of a node that have the same number.

use std::net::TcpListener;

use permafrost_tests::daemon::{Daemon, Options};

use super::{Site, text};

#[test]
fn a_node_starts_if_its_api_or_metrics_have_the_number_of_the_peers_port() {
    let site = Site::new(0);
    for option in ["--listen-api", "--listen-metrics"] {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = free.local_addr().unwrap().to_string();
        drop(free);
        let identity = site.issue(option.trim_start_matches('-'), "node", None);
        let options = Options {
            listen: "none".to_owned(),
            extra: [
                "--listen-peers",
                &address,
                option,
                &address,
                "--identity",
                text(&identity),
            ]
            .map(str::to_owned)
            .to_vec(),
            ..Options::default()
        };
        let node = Daemon::start(&site.path(option), &options).unwrap();
        assert_eq!(node.peers(), address);
        std::net::TcpStream::connect(&address).unwrap();
        node.stop().unwrap();
    }
}
