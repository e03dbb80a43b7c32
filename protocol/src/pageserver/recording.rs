//! Recorded conversations.
