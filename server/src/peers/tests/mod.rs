mod matrix;
mod parked;
mod quotas;
mod reading;
mod silence;
mod site;
