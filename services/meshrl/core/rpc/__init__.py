"""What every gRPC server of the mesh is built from: serving, interceptors, health, reflection."""
