// meshrl-go lists, watches and plays:
//
//	meshrl-go list ROLLOUT_ADDRESS
//	meshrl-go engines HUB_ADDRESS
//	meshrl-go watch [-count N] TRAINER_ADDRESS
//	meshrl-go rollouts -environment NAME [-task N] [-group-size N] ROLLOUT_ADDRESS
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"time"

	"google.golang.org/grpc"
	pb "meshrl.dev/api/meshrl/v1"
	meshrl "meshrl.dev/go"
)

const usage = "usage: meshrl-go list|engines|watch|rollouts [FLAGS] HOST:PORT"

var (
	flags       = flag.NewFlagSet("meshrl-go", flag.ExitOnError)
	count       = flags.Int("count", 0, "watch: end after this many steps; 0 watches on")
	environment = flags.String("environment", "", "rollouts: the environment to play")
	task        = flags.Uint64("task", 0, "rollouts: the task's position in the taskset")
	groupSize   = flags.Uint("group-size", 1, "rollouts: how many to play")

	commands = map[string]func(context.Context, *grpc.ClientConn) error{
		"list": list, "engines": engines, "watch": watch, "rollouts": rollouts,
	}
	enough = errors.New("enough steps")
)

func main() {
	if len(os.Args) < 3 || commands[os.Args[1]] == nil {
		fail(usage)
	}
	_ = flags.Parse(os.Args[2:]) // ends the program itself
	if flags.NArg() != 1 {
		fail(usage)
	}
	connection, err := meshrl.Dial(flags.Arg(0))
	if err == nil {
		defer connection.Close()
		err = commands[os.Args[1]](context.Background(), connection)
	}
	if err != nil {
		fail(fmt.Sprintf("Error: %s: %s %v", flags.Arg(0), meshrl.ReasonOf(err), err))
	}
}

func fail(text string) {
	fmt.Fprintln(os.Stderr, text)
	os.Exit(1)
}

func list(ctx context.Context, connection *grpc.ClientConn) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	request := &pb.ListEnvironmentsRequest{ContractVersion: meshrl.ContractVersion}
	answer, err := pb.NewRolloutServiceClient(connection).ListEnvironments(ctx, request)
	if err != nil {
		return err
	}
	for _, each := range answer.Environments {
		tasks := "endless"
		if each.NumTasks != nil {
			tasks = fmt.Sprint(*each.NumTasks)
		}
		fmt.Printf("%s  taskset %s  tasks %s\n", each.Name, each.Taskset, tasks)
	}
	return nil
}

func engines(ctx context.Context, connection *grpc.ClientConn) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	answer, err := pb.NewWeightSyncClient(connection).ListEngines(ctx, &pb.ListEnginesRequest{})
	if err != nil {
		return err
	}
	for _, each := range answer.Engines {
		fmt.Printf("%s  %s  %v  version %d\n", each.EngineId, each.Url, each.State, each.GetServingVersion())
	}
	return nil
}

func watch(ctx context.Context, connection *grpc.ClientConn) error {
	done := 0
	err := meshrl.WatchSteps(ctx, pb.NewTrainerServiceClient(connection), &pb.WatchStepsRequest{},
		func(event *pb.WatchStepsResponse) error {
			switch event.State {
			case pb.StepState_STEP_STATE_DONE:
				fmt.Printf("step %d  loss %.4g  %.2f s\n", event.Step, event.Metrics["loss/mean"], event.TimingsS["step"])
				if done++; done == *count {
					return enough
				}
			case pb.StepState_STEP_STATE_FAILED:
				fmt.Printf("step %d failed: %s: %s\n", event.Step, event.Reason, event.Message)
			}
			return nil
		})
	if err == enough {
		return nil
	}
	return err
}

func rollouts(ctx context.Context, connection *grpc.ClientConn) error {
	request := &pb.RunRolloutsRequest{
		Environment: *environment, GroupSize: uint32(*groupSize), Task: &pb.RunRolloutsRequest_TaskIndex{TaskIndex: *task},
	}
	return meshrl.RunRollouts(ctx, pb.NewRolloutServiceClient(connection), request, func(answer *pb.RunRolloutsResponse) error {
		switch event := answer.Event.(type) {
		case *pb.RunRolloutsResponse_Rollout:
			sampled := 0
			for _, sample := range event.Rollout.Samples {
				mask, err := meshrl.Bools(sample.LossMask)
				if err != nil {
					return err
				}
				for _, is := range mask {
					if is {
						sampled++
					}
				}
			}
			fmt.Printf("reward %.3f  %d tokens  %q\n", event.Rollout.GetReward(), sampled, event.Rollout.Completion)
		case *pb.RunRolloutsResponse_Failure:
			fmt.Printf("failed  %s: %s\n", event.Failure.Reason, event.Failure.Message)
		case *pb.RunRolloutsResponse_Summary:
			fmt.Printf("%d finished, %d failed\n", event.Summary.Finished, event.Summary.Failed)
		}
		return nil
	})
}
