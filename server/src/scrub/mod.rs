//! Verifying what is held, in the background and on request, and mending it from other nodes.
