//! Tests of the project itself: its source, its documents, and the uses of its public types.

mod campaigns;
mod defects;
mod features;
mod guide;
mod hygiene;
mod imports;
mod msrv;
mod names;
mod numbers;
mod observing;
mod public_api;
mod public_items;
mod release;
mod rooms;
mod sentences;
mod test_files;
