//! Directories of certificates, sound and otherwise.
