//! Tests of stopping the server.

use tokio::sync::Notify;

use super::*;

/// A request that is answered when the test releases it.
#[derive(Default)]
struct Gate {
    entered: Notify,
    open: Notify,
}

async fn start_with(gate: &Arc<Gate>, options: ServeOptions) -> Server {
    let gate = Arc::clone(gate);
    let held = async move || {
        gate.entered.notify_one();
        gate.open.notified().await;
        "done"
    };
    let router = router().route("/held", get(held));
    serve(options, router).await.unwrap()
}

#[tokio::test]
async fn a_stop_ends_streams_and_lets_answers_be_given() {
    let place = Place::new();
    let gate = Arc::new(Gate::default());
    let server = start_with(&gate, place.options()).await;
    let mut idle = at_socket(&server).await;
    assert_eq!(said(&mut idle, ask("/who", None)).await.status, 200);
    let mut streaming = at_socket(&server).await;
    let mut events = streaming
        .send_request(ask("/events", None))
        .await
        .unwrap()
        .into_body();
    let first = events.frame().await.unwrap().unwrap();
    assert_eq!(first.data_ref().unwrap().as_ref(), b"data: 1\n\n");
    let mut busy = at_socket(&server).await;
    let answering = tokio::spawn(async move { said(&mut busy, ask("/held", None)).await });
    gate.entered.notified().await;

    let socket = server.socket().to_owned();
    let stopping = tokio::spawn(server.stop());
    // A proper end of the stream, not a broken one.
    assert!(events.frame().await.is_none());
    assert!(!stopping.is_finished());
    gate.open.notify_one();
    stopping.await.unwrap();
    assert_eq!(answering.await.unwrap().text, "done");
    assert!(idle.send_request(ask("/who", None)).await.is_err());
    assert!(!socket.exists());
}

#[tokio::test]
async fn what_takes_longer_than_the_grace_is_ended() {
    let place = Place::new();
    let mut options = place.options();
    options.limits.grace = Duration::from_millis(20);
    let gate = Arc::new(Gate::default());
    let server = start_with(&gate, options).await;
    let mut busy = at_socket(&server).await;
    let answering =
        tokio::spawn(async move { busy.send_request(ask("/held", None)).await.is_ok() });
    gate.entered.notified().await;
    server.stop().await;
    assert!(!answering.await.unwrap());
}
