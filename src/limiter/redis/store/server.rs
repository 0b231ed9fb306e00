//! A server with its connection, which is kept while the server is.

use std::sync::Arc;

use fred::clients::Client;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use super::address::Address;
use super::events::Events;
use super::link::Link;
use super::reconnect;
use super::settings::Settings;

/// A server. Dropping it closes its connection.
pub(super) struct Server {
    pub(super) link: Arc<Link>,
    reconnect: AbortHandle,
}

impl Server {
    /// Starts to connect with a client that is not connected yet.
    pub(super) fn start(
        runtime: &Handle,
        address: Address,
        client: Client,
        is_sentinel: bool,
        settings: &Settings,
        events: Arc<Events>,
        alarm: Option<Arc<Notify>>,
    ) -> Self {
        let link = Arc::new(Link::new(address, client, is_sentinel, settings.failures, events, alarm));
        let reconnect = runtime.spawn(reconnect::keep(Arc::clone(&link), settings.clone())).abort_handle();
        Self { link, reconnect }
    }

    pub(super) fn close(&self) {
        self.link.close();
        self.reconnect.abort();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.reconnect.abort();
        self.link.leave();
    }
}
