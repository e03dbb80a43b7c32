//! Checks a configuration without starting a daemon.

use permafrost_http_api::serve::{self, Limits, Rate, ServeOptions};
use permafrost_identity::ReloadingIdentity;
use permafrost_quotas::Quotas;

use super::StartError;
use crate::config::Config;

/// Checks the files of certificates, tokens and quotas that a configuration names, and that the API is protected.
/// Opens no store and binds no address: those a daemon may have open that runs with the same configuration.
///
/// # Errors
/// The error that the daemon's start would fail with.
pub fn check(config: &Config) -> Result<(), StartError> {
    let identity = config.identity.as_ref().map(ReloadingIdentity::load);
    let identity = identity.transpose()?;
    let options = ServeOptions {
        run_dir: config.run_dir.clone(),
        listen: config.api.listen,
        identity,
        tokens: config.api.tokens.clone(),
        audit: None,
        limits: Limits {
            rate: Rate::of(config.api.rate_per_s),
            ..Limits::default()
        },
    };
    serve::check(&options)?;
    config.quotas.as_deref().map(Quotas::load).transpose()?;
    Ok(())
}
