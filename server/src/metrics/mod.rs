//! What this node counts, for Prometheus.
