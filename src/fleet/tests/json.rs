//! The settings as JSON.

use serde_json::{Value, json};

use super::*;

#[tokio::test(start_paused = true)]
async fn json_has_the_settings_and_the_last_actions() {
    let (_, _, [here, _]) = processes().await;
    let shown = || serde_json::from_str::<Value>(&here.to_json()).unwrap();
    let before = shown();
    assert_eq!([&before["revision"], &before["since"]], [&json!(0), &Value::Null]);
    assert_eq!([&before["entries"], &before["actions"]], [&json!([]), &json!([])]);
    here.mode("client", Mode::Enforce);
    here.change("alice", "an incident", shadow()).await.unwrap();
    let now = shown();
    assert!(now["since"].is_string() && now["read_at"].is_string() && now["hash"].is_string(), "{now}");
    assert_eq!([&now["restored_at"], &now["error"]], [&Value::Null; 2]);
    let entry = json!([{
        "kind": "mode", "name": "client", "subject": null, "value": "shadow", "until": null,
        "revision": 1, "at": now["since"], "by": "alice", "why": "an incident",
    }]);
    assert_eq!((&now["revision"], &now["entries"], &now["actions"]), (&json!(1), &entry, &entry));
}
