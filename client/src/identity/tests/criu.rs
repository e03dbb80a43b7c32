//! CRIU's side of TLS, played by rustls.
