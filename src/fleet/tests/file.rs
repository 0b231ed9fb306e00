//! A fleet of one process, which keeps its settings in a file.

use super::*;

#[tokio::test]
async fn file_keeps_what_was_set_over_a_restart() {
    let folder = std::env::temp_dir().join(format!("tower-ratelimit-fleet-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("settings");
    {
        let fleet = Fleet::in_file(&path).await.unwrap();
        fleet.mode("client", Mode::Enforce);
        fleet.change("alice", "", shadow()).await.unwrap();
        fleet.change("alice", "again", shadow()).await.unwrap();
    }
    let fleet = Fleet::in_file(&path).await.unwrap();
    assert_eq!(fleet.mode("client", Mode::Enforce).get(), Mode::Shadow);
    assert_eq!((fleet.in_force().revision, &*fleet.entries()[0].why), (2, "again"));
    #[cfg(feature = "status")]
    assert!(fleet.is_in_file());
    std::fs::write(&path, "no such form").unwrap();
    assert!(Fleet::in_file(&path).await.is_err());
    assert!(Fleet::in_file(path.join("below")).await.is_err(), "a file has no files");
    std::fs::remove_dir_all(folder).unwrap();
}

#[tokio::test]
async fn change_that_the_disk_refuses_says_so_at_once() {
    let folder = std::env::temp_dir().join(format!("tower-ratelimit-fleet-disk-{}", std::process::id()));
    std::fs::create_dir_all(folder.join("settings.new")).unwrap(); // a folder where the new file would be written
    let fleet = Fleet::in_file(folder.join("settings")).await.unwrap();
    fleet.mode("client", Mode::Enforce);
    // The ten seconds of a change end in another error.
    let error = fleet.change("alice", "", shadow()).await.unwrap_err();
    assert_eq!((error.kind(), &*error.to_string()), (FleetErrorKind::Unavailable, "nothing was changed"));
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("settings: "), "{cause}");
    std::fs::remove_dir(folder.join("settings.new")).unwrap();
    assert_eq!(fleet.change("alice", "", shadow()).await.unwrap(), 1);
    std::fs::remove_dir_all(folder).unwrap();
}
