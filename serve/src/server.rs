//! The server's life: connections are taken until a signal comes, and answers that are under way may end.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use axum::serve::Listener;
use common::report::say;
use futures_util::{Stream, StreamExt, stream};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;

use crate::app::{App, router};

/// For the last step of an engine that was stopped, and for the errors that go out then.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Answers calls until the first of `signals`. Those under way then have `grace` to end, or until another signal; what
/// is left after that is ended with an error. Connections without a call are closed at once.
pub async fn serve(
    mut listener: TcpListener,
    app: Arc<App>,
    signals: impl Stream<Item = ()>,
    grace: Duration,
) {
    let mut signals = pin!(signals);
    let service = TowerToHyperService::new(router(Arc::clone(&app)));
    let connections = GracefulShutdown::new();
    let mut http = http1::Builder::new();
    // With a timer, a head that does not arrive in 30 seconds ends its connection.
    http.timer(TokioTimer::new());
    loop {
        tokio::select! {
            (stream, _) = Listener::accept(&mut listener) => {
                // Tokens are small: otherwise one waits until the client has acknowledged the one before, up to 40 ms.
                let _ = stream.set_nodelay(true);
                let connection = http.serve_connection(TokioIo::new(stream), service.clone());
                // It fails where the client goes away or speaks no HTTP, which is the client's affair.
                tokio::spawn(connections.watch(connection));
            }
            _ = signals.next() => break,
        }
    }
    drop(listener);
    say("shutting down");
    let late = async {
        tokio::select! {
            () = tokio::time::sleep(grace) => {}
            Some(()) = signals.next() => {}
        }
        app.worker.stop();
        // A client that does not read its error is not waited for.
        tokio::time::sleep(LAST_WORDS).await;
    };
    tokio::select! {
        () = connections.shutdown() => {}
        () = late => {}
    }
    app.worker.stop();
    let _ = tokio::time::timeout(LAST_WORDS, app.worker.ended()).await;
}

/// What asks the process to end: SIGINT, and on Unix SIGTERM.
///
/// # Errors
/// If the signals cannot be waited for.
pub fn signals() -> Result<impl Stream<Item = ()>> {
    #[cfg(unix)]
    let mut terminate = {
        use anyhow::Context;
        use tokio::signal::unix::{SignalKind, signal};
        signal(SignalKind::terminate()).context("SIGTERM cannot be waited for")?
    };
    let next = async move || {
        #[cfg(unix)]
        let terminated = terminate.recv();
        #[cfg(not(unix))]
        let terminated = std::future::pending::<()>();
        tokio::select! {
            _ = tokio::signal::ctrl_c() => {}
            _ = terminated => {}
        }
    };
    Ok(stream::unfold(next, async |mut next| {
        next().await;
        Some(((), next))
    }))
}
