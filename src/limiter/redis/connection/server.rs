//! A server with its connection. The connection is kept while the server is known.

use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use super::address::Address;
use super::link::Link;
use super::reconnect;
use super::settings::ConnectionSettings;
use super::transport::Transport;
use crate::limiter::remote::Events;

/// A server. Dropping the server closes its connection.
pub(super) struct Server {
    pub(super) link: Arc<Link>,
    reconnect: AbortHandle,
}

impl Server {
    /// Starts to connect a transport. `cluster` notifies the task that fetches the cluster's map, if the server is
    /// part of a cluster.
    pub(super) fn start(
        runtime: &Handle,
        address: Address,
        transport: Box<dyn Transport>,
        cluster: Option<Arc<Notify>>,
        settings: &ConnectionSettings,
        events: Arc<Events>,
    ) -> Self {
        let link = Arc::new(Link::new(address, transport, cluster, settings, events));
        let reconnect = runtime.spawn(reconnect::keep(Arc::clone(&link), settings.clone())).abort_handle();
        Self { link, reconnect }
    }

    pub(super) fn close(&self) {
        self.link.health.close();
        self.reconnect.abort();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.reconnect.abort();
        self.link.health.retire();
    }
}
