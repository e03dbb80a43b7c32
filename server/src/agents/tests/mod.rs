mod matrix;
mod site;
