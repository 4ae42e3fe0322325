//! STATUS: whether an ADD could be served now.

use super::{PrimaryCall, readiness};
use crate::cni::{Code, DefaultNetwork, Error, NetworkName};
use crate::delegate::{Executables, NetworkConfiguration};
use crate::plugin::status;

/// Nothing goes to stdout. The readiness file is not waited for.
///
/// # Errors
/// [`Code::NotAvailable`], or the default network's own code where it is that.
pub(super) fn run_status(context: &PrimaryCall<'_>) -> Result<(), Error> {
    let unavailable = |error: Error| Error { code: Code::NotAvailable, ..error };
    readiness::look(context.primary).map_err(unavailable)?;
    let by_name = matches!(context.primary.default, DefaultNetwork::Cluster(NetworkName::Name(_)));
    // Its definition can't be looked up now, and the agent repairs that.
    if !status::available(context.conf)? && by_name {
        return Ok(());
    }
    let network = status_default_network(context).map_err(unavailable)?;
    let call = context.call();
    network
        .find(&Executables, &call)
        .and_then(|()| network.status(&Executables, &call))
        .map_err(|error| unavailable(Error { msg: format!("network {}: {}", network.name, error.msg), ..error }))
}

fn status_default_network(context: &PrimaryCall<'_>) -> Result<NetworkConfiguration, Error> {
    let source = context.source();
    let networks = context.common_networks(source.as_deref())?.networks;
    let network = networks.first().map(|network| NetworkConfiguration::from(&network.configuration));
    network.ok_or_else(|| Error::new(Code::Internal, "there is no default network"))
}
